"""Data parallelism on the host: rows/s of several engines over those of one, model time fixed.

    python -m bench.kernels.replicas [--engines 1 2 4] [--rows chat vectors]

Engines are processes that answer 64 requests at a time, each after a fixed time, like a GPU that
computes while the host is free. A run goes through the whole path: input, plan, wire, output.
Prints a markdown table; the ratio is to the rows/s of one engine times their number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tidemill.protocol.contract import EngineInfo, Reply

from .host_path import NullEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("chat", "vectors")
_SLOTS = 64
_SERVICE_SECONDS = {"chat": 0.4, "vectors": 0.2}
_LINES_PER_ENGINE = 3_000
_MODEL = {"model": "null"}


class FixedEngine(NullEngine):
    """Answers a number of requests at a time, each after a fixed time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._slots = asyncio.Semaphore(_SLOTS)

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer once a slot is free and the fixed time is over."""
        async with self._slots:
            await asyncio.sleep(self._seconds)
            return await super().respond(url, _MODEL | body, request_id, created)

    def info(self) -> EngineInfo:
        """Return the number of slots."""
        return EngineInfo("null", None, "none", "none", 0, _SLOTS)


def serve(arguments: Sequence[str]) -> None:
    """Run as an engine process."""
    from tidemill.engine_process import child

    parser = argparse.ArgumentParser()
    for name in ("reader", "writer", "liveness"):
        parser.add_argument(f"--{name}-fd", type=int)
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args(arguments)
    child.serve(
        lambda _: FixedEngine(given.seconds),
        reader_fd=given.reader_fd,
        writer_fd=given.writer_fd,
        liveness_fd=given.liveness_fd,
    )


def write_lines(path: Path, count: int, rows: str) -> None:
    """Write requests, eight at a time with the same beginning."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"{'word ' * 60}{number // 8} " * 3 + str(number)
            url = "/v1/embeddings"
            body: dict[str, Any] = {"input": text, "encoding_format": "base64"}
            if rows == "chat":
                messages = [{"role": "user", "content": text}]
                url, body = "/v1/chat/completions", {"messages": messages, "max_tokens": 16}
            line = {"custom_id": str(number), "url": url, "body": body}
            file.write(json.dumps(line) + "\n")


def measure(engines: int, rows: str, folder: Path) -> float:
    """Return the rows/s of a run over some engines, without their start."""
    from tidemill.offline.run import job, replicas
    from tidemill.offline.run.run_options import RunOptions

    source, target = folder / "in.jsonl", folder / "out.jsonl"
    count = _LINES_PER_ENGINE * engines
    write_lines(source, count, rows)
    command = [sys.executable, "-m", "bench.kernels.replicas", "--serve"]
    command += [f"--seconds={_SERVICE_SECONDS[rows]}"]

    @contextmanager
    def made(*given: Any) -> Iterator[replicas.EngineReplicas]:
        index = given[3]
        homes = index.records["prefixes"][:, 2].copy()
        yield replicas.EngineReplicas(
            [command] * engines, created=given[4], home=lambda place: int(homes[place])
        )

    options = RunOptions(str(source), str(target), model="null", force=True, no_card=False)
    with mock.patch.multiple(job, num_engines=lambda _: 2, replicas=made):
        assert job.run_job(options) == 0
    card = json.loads((folder / "out.card.json").read_text())
    return float(card["rows_per_second"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["--serve"]:
        serve(given[1:])
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.replicas")
    parser.add_argument("--engines", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument(
        "--rows", choices=("chat", "vectors"), nargs="+", default=("chat", "vectors")
    )
    options = parser.parse_args(given)
    print("| rows | engines | rows/s | of one × N |")
    print("|---|---:|---:|---:|")
    for rows in options.rows:
        first = None
        for engines in options.engines:
            with tempfile.TemporaryDirectory() as folder:
                rate = measure(engines, rows, Path(folder))
            first = first or rate / engines
            print(
                f"| {rows} | {engines} | {rate:,.1f} | {rate / engines / first:.3f} |", flush=True
            )


if __name__ == "__main__":
    main()
