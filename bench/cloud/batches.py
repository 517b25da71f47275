"""Batches from a bucket on one machine, through MiniStack, the pump and real worker processes.

    python -m bench.cloud.batches lines 10000 1000000   # each stage's lines/s, peak memory
    python -m bench.cloud.batches lines 1000 100000 --vector 1024       # the same with vectors
    python -m bench.cloud.batches workers 1 2 4         # throughput, engine of fixed service time

The engine is scripted, so that everything around it is measured. Prints markdown tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localstack.cloud import Cloud
from localstack.ministack import environment_for, running_ministack
from localstack.processes import ROOT
from localstack.resources import create_resources

MODEL = "scripted"
_ENGINE = ROOT / "tests/engine_process/scripted_engine.py"
_MIB = 2**20
_WAIT_SECONDS = 3600


@contextmanager
def running_cloud(folder: Path, engine: Sequence[str], **settings: str) -> Iterator[Cloud]:
    """Run a cloud whose workers have the scripted engine, with a pump and no worker yet."""
    command = json.dumps([sys.executable, str(_ENGINE), *engine])
    with running_ministack(folder) as endpoint_url:
        resources = create_resources(endpoint_url, prefix="tidemill", models=[MODEL])
        environment = environment_for(endpoint_url) | {"TIDEMILL_ENGINE_COMMAND": command}
        with Cloud(resources, environment | settings, folder) as cloud:
            cloud.start_lambdas()
            yield cloud


def start_worker(cloud: Cloud, name: str) -> None:
    """Start one worker of the scripted model."""
    cloud.start_worker("--served-model-name", MODEL, name=name)


def request_lines(count: int, **fields: int) -> bytes:
    """Return a file of short chat requests, with further fields for the engine."""
    messages = [{"role": "user", "content": "What is the capital?"}]
    body = {"model": MODEL, "messages": messages, **fields}
    tail = json.dumps({"method": "POST", "url": "/v1/chat/completions", "body": body})[1:]
    return b"".join(b'{"custom_id": "request-%d", %s\n' % (i, tail.encode()) for i in range(count))


def peak_bytes(pid: int) -> dict[str, int]:
    """Return the peak resident memory of a process and of its children."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            status = dict(
                line.split(":", 1) for line in path.read_text().splitlines() if ":" in line
            )
        except OSError:
            continue  # it has ended in the meantime
        own, parent = int(status["Pid"]), int(status["PPid"])
        if pid in {own, parent} and "VmHWM" in status:
            found["itself" if own == pid else "its engine"] = 1024 * int(status["VmHWM"].split()[0])
    return found


def run_lines(counts: Sequence[int], vector: int | None) -> None:
    """Print the duration of each stage of a batch, from the times in its report.

    Rows are vectors of `vector` numbers, if it is given.
    """
    fields = {} if vector is None else {"vector": vector}
    print("| lines | read and cut, lines/s | run, lines/s | joined, lines/s | MiB: pump "
          "| worker | its engine |")  # fmt: skip
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder, running_cloud(Path(folder), []) as cloud:
            start_worker(cloud, "worker")
            cloud.drop("x", request_lines(count, **fields))
            report = cloud.wait("x", _WAIT_SECONDS)
            assert report["request_counts"]["completed"] == count, report
            lambdas = peak_bytes(cloud.processes["lambdas"].pid)["itself"]
            worker = peak_bytes(cloud.processes["worker"].pid)
        seconds = [
            max(1, report[end] - report[begin])
            for begin, end in (
                ("created_at", "in_progress_at"),
                ("in_progress_at", "finalizing_at"),
                ("finalizing_at", "completed_at"),
            )
        ]
        rates = " | ".join(f"{count / each:,.0f}" for each in seconds)
        memory = [lambdas, worker["itself"], worker["its engine"]]
        print(f"| {count:,} | {rates} | {' | '.join(f'{each / _MIB:.0f}' for each in memory)} |")


def run_workers(numbers: Sequence[int], slots: int, service_seconds: float, lines: int) -> None:
    """Print throughput by the number of workers, as a share of linear."""
    print("| workers | lines | rows/s | of linear |")
    print("|---:|---:|---:|---:|")
    alone = None
    for number in numbers:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            journal = folder / "journal"
            engine = ["--log", str(journal), "--slots", str(slots)]
            engine += ["--service-seconds", str(service_seconds)]
            settings = {"TIDEMILL_SHARD_LINES": "64", "TIDEMILL_MAX_INFLIGHT": str(2 * slots)}
            with running_cloud(folder, engine, **settings) as cloud:
                for index in range(number):
                    start_worker(cloud, f"worker-{index}")
                cloud.drop("x", request_lines(lines * number))
                report: dict[str, Any] = cloud.wait("x", _WAIT_SECONDS)
            assert report["request_counts"]["completed"] == lines * number, report
            times = [float(line.split("\t")[2]) for line in journal.read_text().splitlines()]
        rate = lines * number / (max(times) - min(times))
        alone = alone or rate / number
        print(f"| {number} | {lines * number:,} | {rate:,.1f} | {rate / number / alone:.3f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = parser.add_subparsers(dest="kind", required=True)
    lines = kinds.add_parser("lines")
    lines.add_argument("counts", type=int, nargs="+")
    lines.add_argument("--vector", type=int, help="set the numbers in each row")
    workers = kinds.add_parser("workers")
    workers.add_argument("numbers", type=int, nargs="+")
    workers.add_argument("--slots", type=int, default=8)
    workers.add_argument("--service-seconds", type=float, default=0.2)
    workers.add_argument("--lines", type=int, default=2400, help="set the lines per worker")
    parsed = parser.parse_args(arguments)
    if parsed.kind == "lines":
        run_lines(parsed.counts, parsed.vector)
    else:
        run_workers(parsed.numbers, parsed.slots, parsed.service_seconds, parsed.lines)


if __name__ == "__main__":
    main()
