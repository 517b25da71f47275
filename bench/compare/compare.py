"""Files through Tidemill, transformers, vLLM's CPU build, OpenVINO: seconds, tokens/s, memory.

    python -m bench.compare.compare out/bench/base.jsonl out/bench/g.jsonl \
        [--vllm-python PATH] [--openvino-python PATH] [--runs 3] [--json out/compare.json]
        [--peers transformers,vllm,openvino,no-plan] [--rows out/rows]

The lines of a file name its model, a folder next to the file unless `--model` names another one.
All engines are measured from outside in the same way. *Whole process*: from launch to exit.
*Steady state*: output tokens, and rows, over the time from "can generate" to "all rows done", as in
each one's output. It includes prefill, but not loading and compiling before the first request. If
answers have no fixed length, programs may write different numbers of tokens: then compare rows.
*Peak memory*: the process and all its children. Runs of all files and peers take turns; figures are
medians, then the range. `--rows` keeps the rows of the last run of each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from bench.compare import peers
from bench.compare.peers import Job, Peer
from bench.processes import RunFailed, measure

MEGABYTE = 1_000_000
PEERS = ("transformers", "vllm", "openvino")
CHOICES = (*PEERS, "no-plan")


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one run of one file by one peer."""

    file: str
    peer: str
    whole_seconds: float
    steady_seconds: float
    peak_bytes: int
    prompt_tokens: int
    output_tokens: int
    num_rows: int

    @property
    def steady_rows_per_second(self) -> float:
        """Return the rows per second between the marks."""
        return self.num_rows / self.steady_seconds

    @property
    def steady_tokens_per_second(self) -> float:
        """Return the output tokens per second between the marks."""
        return self.output_tokens / self.steady_seconds


def run_once(job: Job, peer: Peer, folder: Path) -> Run:
    """Run the file once through `peer` and check that every request was answered."""
    output = folder / f"{job.requests.stem}-{peer.name}.jsonl"
    output.unlink(missing_ok=True)
    command = [*peer.command, "-o", str(output)]
    measured = measure(command, peer.environment, peer.marks, folder / f"{peer.name}.log")
    prompt_tokens, output_tokens = count_tokens(output, job.num_requests)
    return Run(
        job.requests.stem,
        peer.name,
        measured.whole_seconds,
        measured.steady_seconds,
        measured.peak_bytes,
        prompt_tokens,
        output_tokens,
        job.num_requests,
    )


def count_tokens(output: Path, num_requests: int) -> tuple[int, int]:
    """Sum the prompt and completion tokens in the rows; RunFailed if one is missing."""
    with output.open(encoding="utf-8") as rows:
        responses = [json.loads(row)["response"] for row in rows]
    answered = [response for response in responses if response["status_code"] == 200]
    if len(answered) != num_requests:
        raise RunFailed(f"{output.name}: {len(answered)} of {num_requests} requests answered.")
    usages = [response["body"]["usage"] for response in answered]
    return (
        sum(usage["prompt_tokens"] for usage in usages),
        sum(usage["completion_tokens"] for usage in usages),
    )


def read_job(requests: Path, model: str | None, dtype: str) -> Job:
    """Return the job of one file; its first line names the model, which is next to the file."""
    lines = [line for line in requests.read_text(encoding="utf-8").splitlines() if line.strip()]
    served_name = json.loads(lines[0])["body"]["model"]
    folder = model or str(requests.parent / served_name)
    return Job(folder, requests, served_name, dtype, len(lines))


def chosen_peers(
    job: Job, names: list[str], vllm_python: Path | None, openvino_python: Path | None
) -> list[Peer]:
    """Return ourselves first, then the requested peers whose interpreters are given."""
    chosen = [peers.tidemill(job)]
    if "no-plan" in names:
        chosen.append(peers.arrival_order(job))
    if "transformers" in names:
        chosen.append(peers.transformers(job))
    if "vllm" in names and vllm_python is not None:
        chosen.append(peers.vllm(job, vllm_python))
    if "openvino" in names and openvino_python is not None:
        chosen.append(peers.openvino(job, openvino_python))
    return chosen


def table(runs: list[Run]) -> str:
    """Return the markdown table: a row for each peer, with our advantage as a factor."""
    names = list(dict.fromkeys(run.peer for run in runs))
    columns: list[tuple[str, Callable[[Run], float], bool]] = [
        ("whole process, s", lambda run: run.whole_seconds, False),
        ("steady state, output tok/s", lambda run: run.steady_tokens_per_second, True),
        ("rows/s", lambda run: run.steady_rows_per_second, True),
        ("peak memory, MB", lambda run: run.peak_bytes / MEGABYTE, False),
    ]
    header = "".join(f" {title} | {peers.OURS} is |" for title, _, _ in columns)
    lines = [f"| |{header}", "|---|" + "---:|---:|" * len(columns)]
    for name in names:
        cells = []
        for _, figure, more_is_better in columns:
            ours = statistics.median(figure(run) for run in runs if run.peer == peers.OURS)
            figures = [figure(run) for run in runs if run.peer == name]
            median = statistics.median(figures)
            ratio = ours / median if more_is_better else median / ours
            cells += [spread(median, figures), "" if name == peers.OURS else f"{ratio:.2f} ×"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(median: float, figures: list[float]) -> str:
    """Return the median, and the range if there was more than one run."""
    digits = 1 if median < 1000 else 0
    if len(figures) == 1:
        return f"{median:,.{digits}f}"
    return f"{median:,.{digits}f} ({min(figures):,.{digits}f}–{max(figures):,.{digits}f})"


def machine() -> str:
    """Return the machine and the versions in one line."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    return f"{cpu}, {cores} cores, Python {platform.python_version()}, {versions}"


def report(job: Job, runs: list[Run]) -> str:
    """Return the table of one file, followed by the commands that ran."""
    last = runs[-1]
    num_runs = sum(run.peer == last.peer for run in runs)
    shape = (
        f"{job.num_requests} requests of {last.prompt_tokens / job.num_requests:.0f} prompt and "
        f"{last.output_tokens / job.num_requests:.0f} output tokens, {job.served_name}, "
        f"{job.dtype}; runs of each: {num_runs}, median (range)."
    )
    return f"### {job.requests.stem}\n{table(runs)}\n\n{shape}\n"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requests", type=Path, nargs="+", help="run these JSONL files")
    parser.add_argument(
        "--model", help="use this folder or hub id instead of the model in the lines"
    )
    parser.add_argument(
        "--vllm-python", type=Path, help="use this interpreter with vLLM's CPU build"
    )
    parser.add_argument(
        "--openvino-python", type=Path, help="use this interpreter with OpenVINO GenAI"
    )
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="compare with these, comma-separated (%(default)s)"
    )
    parser.add_argument("--runs", type=int, default=3, help="run each N times (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=Path, help="keep the rows of each peer's last run here")
    parser.add_argument("--json", type=Path, help="also write the figures of every run here")
    arguments = parser.parse_args()
    arguments.peers = [name for name in arguments.peers.split(",") if name]
    unknown = sorted(set(arguments.peers) - set(CHOICES))
    if unknown:
        parser.error(f"unknown peers {unknown}: choose from {list(CHOICES)}")
    return arguments


def main() -> None:
    """Compare and print the tables."""
    arguments = parse_arguments()
    jobs = [read_job(path, arguments.model, arguments.dtype) for path in arguments.requests]
    runs: list[Run] = []
    if arguments.rows is not None:
        arguments.rows.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as temporary:
        folder = arguments.rows or Path(temporary)
        for number in range(1, arguments.runs + 1):
            for job in jobs:
                pythons = arguments.vllm_python, arguments.openvino_python
                for peer in chosen_peers(job, arguments.peers, *pythons):
                    try:
                        run = run_once(job, peer, folder)
                    except RunFailed as error:
                        sys.exit(f"{job.requests.stem}, {peer.name}: {error}")
                    runs.append(run)
                    print(
                        f"run {number}, {run.file}, {run.peer}: {run.whole_seconds:.1f} s, "
                        f"{run.steady_tokens_per_second:,.0f} tok/s, "
                        f"{run.steady_rows_per_second:,.1f} rows/s, "
                        f"{run.peak_bytes / MEGABYTE:,.0f} MB",
                        file=sys.stderr,
                        flush=True,
                    )
    for job in jobs:
        print(report(job, [run for run in runs if run.file == job.requests.stem]))
    print(machine() + ".")
    if arguments.json:
        figures = [
            {**asdict(run), "steady_tokens_per_second": run.steady_tokens_per_second}
            for run in runs
        ]
        text = json.dumps({"machine": machine(), "runs": figures}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
