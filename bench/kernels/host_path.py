"""The host path alone: lines/s and peak memory of a run whose engine answers at once.

    python -m bench.kernels.host_path [--lines 10000 1000000] [--rows chat vectors vectors-base64]

Each length runs in a fresh process pinned to one core: the input is read and checked, then read
again, answered by a null engine and written. Vectors have 1,024 dimensions and are made into bodies
like those of `/v1/embeddings`. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tidemill.engine.config import EngineConfig
    from tidemill.protocol.contract import EngineInfo, EngineStats, Reply

DEFAULT_LINES = (10_000, 1_000_000)
ROWS = ("chat", "vectors", "vectors-base64")
_DIMENSIONS = 1_024
# As of an engine on a CPU: it limits the lines in flight.
_MAX_NUM_SEQS = 256
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one run; `peak_bytes` is the peak resident memory."""

    lines: int
    seconds: float
    peak_bytes: int
    rows: str = "chat"
    written_bytes: int = 0

    @property
    def lines_per_second(self) -> float:
        """Lines read, checked, answered and written each second."""
        return self.lines / self.seconds


class NullEngine:
    """Answers every request at once: with the same short completion, or with a vector."""

    def __init__(self) -> None:
        from tidemill.protocol.contract import Usage

        self._num_answered = 0
        self._usage = Usage(prompt_tokens=20, completion_tokens=2)
        message = {"role": "assistant", "content": "Paris."}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        self._completion = {
            "object": "chat.completion",
            "created": 0,
            "choices": [choice],
            "usage": {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22},
        }

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer without reading the request."""
        from tidemill.protocol.contract import Reply

        del created
        if url == "/v1/embeddings":
            return self._embedding(body, request_id)
        reply = {"id": f"chatcmpl-{request_id}", **self._completion, "model": body.get("model")}
        return Reply(200, reply, self._usage)

    @cached_property
    def _vectors(self) -> NDArray[np.float32]:
        """Return several vectors: a body's length depends on the digits of its numbers."""
        import numpy as np

        vectors = np.random.default_rng(0).standard_normal((64, _DIMENSIONS)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def _embedding(self, body: dict[str, Any], request_id: str) -> Reply:
        from tidemill.engine.endpoints.vectors import as_base64, as_numbers
        from tidemill.protocol.contract import Reply, Usage

        self._num_answered += 1
        vector = self._vectors[self._num_answered % len(self._vectors)]
        show = as_base64 if body.get("encoding_format") == "base64" else as_numbers
        reply = {
            "id": f"embd-{request_id}",
            "object": "list",
            "created": 0,
            "model": body.get("model"),
            "data": [{"index": 0, "object": "embedding", "embedding": show(vector)}],
            "usage": {"prompt_tokens": 12, "total_tokens": 12},
        }
        return Reply(200, reply, Usage(prompt_tokens=12))

    def info(self) -> EngineInfo:
        """Do nothing: there is no model to load."""
        from tidemill.protocol.contract import EngineInfo

        return EngineInfo("null", None, "none", "none", 0, _MAX_NUM_SEQS)

    def stats(self) -> EngineStats:
        """Do nothing: no request is ever running."""
        from tidemill.protocol.contract import EngineStats

        return EngineStats()

    def close(self) -> None:
        """Do nothing: no resources are held."""


def write_lines(path: Path, count: int, rows: str) -> None:
    """Write `count` requests for such rows, of about 150 to 300 bytes."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            url, fields = _url_and_fields(number, rows)
            line = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": url,
                "body": {"model": "null", **fields},
            }
            file.write(json.dumps(line) + "\n")


def _url_and_fields(number: int, rows: str) -> tuple[str, dict[str, Any]]:
    question = f"What is the capital of country number {number}?"
    if rows == "chat":
        messages = [
            {"role": "system", "content": "You are a helpful assistant who answers briefly."},
            {"role": "user", "content": question},
        ]
        fields = {"messages": messages, "max_tokens": 64, "temperature": 0}
        return "/v1/chat/completions", fields
    encoding = "base64" if rows == "vectors-base64" else "float"
    return "/v1/embeddings", {"input": question, "encoding_format": encoding}


def run_here(input_path: Path, output_path: Path, lines: int) -> Measured:
    """Run the file in this process and return its time, from the first check to the end."""
    from tidemill.offline.run.job import run_job
    from tidemill.offline.run.run_options import RunOptions

    def load(config: EngineConfig, **_: object) -> NullEngine:
        del config
        return NullEngine()

    started = time.perf_counter()
    status = run_job(
        RunOptions(str(input_path), str(output_path), model="null", force=True), load=load
    )
    seconds = time.perf_counter() - started
    assert status == 0
    return Measured(lines, seconds, peak_bytes())


def peak_bytes() -> int:
    """Return the peak of this process's resident memory."""
    # Not getrusage: its maximum is inherited from the parent process.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def measure(lines: int, rows: str, folder: Path) -> Measured:
    """Run `lines` lines in a fresh process on one core and return the time."""
    input_path = folder / f"{rows}-{lines}.jsonl"
    write_lines(input_path, lines, rows)
    command = [sys.executable, "-m", "bench.kernels.host_path", "--one", str(input_path)]
    process = subprocess.run(
        [*command, "--lines", str(lines)],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, peak_bytes = process.stdout.split()
    written = input_path.with_suffix(".out").stat().st_size
    input_path.with_suffix(".out").unlink()
    return Measured(lines, float(seconds), int(peak_bytes), rows, written)


def table(measured: Sequence[Measured]) -> str:
    """Return the markdown table; ratios are to the first of the same rows."""
    rows = [
        "| rows | lines | seconds | lines/s | bytes a row | peak MiB | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in measured:
        first = next(other for other in measured if other.rows == one.rows)
        rows.append(
            f"| {one.rows} | {one.lines:,} | {one.seconds:.2f} | {one.lines_per_second:,.0f} "
            f"| {one.written_bytes / one.lines:,.0f} | {one.peak_bytes / _MIB:.1f} "
            f"| {one.peak_bytes / first.peak_bytes:.2f} |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each length and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.host_path")
    parser.add_argument("--lines", type=int, nargs="+", default=DEFAULT_LINES)
    parser.add_argument("--rows", choices=ROWS, nargs="+", default=ROWS[:1])
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        one = run_here(options.one, options.one.with_suffix(".out"), options.lines[0])
        print(one.seconds, one.peak_bytes)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(n, rows, Path(folder)) for rows in options.rows for n in options.lines]
        print(table(found))


if __name__ == "__main__":
    main()
