"""The host path alone: lines/s and peak memory of a run whose engine answers at once.

    python -m bench.host_path [--lines 10000 1000000]

Each length runs in a fresh process pinned to one core: the input is read and checked, then read
again, answered by a null engine and written. Prints a markdown table.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.contract import EngineInfo, EngineStats, Reply

DEFAULT_LINES = (10_000, 1_000_000)
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run took; `peak_bytes` is the most memory that was resident."""

    lines: int
    seconds: float
    peak_bytes: int

    @property
    def lines_per_second(self) -> float:
        """Lines read, checked, answered and written each second."""
        return self.lines / self.seconds


class NullEngine:
    """Answers every request at once with the same short completion."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer without looking."""
        from engine.contract import Reply, Usage

        del url, created
        choice = {"index": 0, "message": {"role": "assistant", "content": "Paris."}}
        reply = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice | {"finish_reason": "stop", "logprobs": None}],
            "usage": {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22},
        }
        return Reply(200, reply, Usage(prompt_tokens=20, completion_tokens=2))

    def info(self) -> EngineInfo:
        """Nothing is loaded."""
        from engine.contract import EngineInfo

        return EngineInfo("null", None, "none", "none", 0, 1)

    def stats(self) -> EngineStats:
        """Nothing ever runs."""
        from engine.contract import EngineStats

        return EngineStats()

    def close(self) -> None:
        """Nothing is held."""


def write_lines(path: Path, count: int) -> None:
    """Write `count` chat requests of about 300 bytes."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = [
                {"role": "system", "content": "You are a helpful assistant who answers briefly."},
                {"role": "user", "content": f"What is the capital of country number {number}?"},
            ]
            body = {"model": "null", "messages": messages, "max_tokens": 64, "temperature": 0}
            line = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")


def run_here(input_path: Path, output_path: Path, lines: int) -> Measured:
    """Run the file in this process and return what it took, from the first check to the end."""
    from cli.running.job import run_job
    from cli.running.options import RunOptions

    def load(config: EngineConfig, **_: object) -> NullEngine:
        del config
        return NullEngine()

    started = time.perf_counter()
    status = run_job(
        RunOptions(str(input_path), str(output_path), model="null", force=True), load=load
    )
    seconds = time.perf_counter() - started
    assert status == 0
    return Measured(lines, seconds, _peak_bytes())


def _peak_bytes() -> int:
    # Not getrusage: its maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def measure(lines: int, folder: Path) -> Measured:
    """Run `lines` lines in a fresh process on one core and return what it took."""
    input_path = folder / f"{lines}.jsonl"
    write_lines(input_path, lines)
    command = [sys.executable, "-m", "bench.host_path", "--one", str(input_path)]
    process = subprocess.run(
        [*command, "--lines", str(lines)],
        cwd=Path(__file__).parent.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, peak_bytes = process.stdout.split()
    return Measured(lines, float(seconds), int(peak_bytes))


def table(measured: Sequence[Measured]) -> str:
    """Return the markdown table; ratios are to the first row."""
    rows = ["| lines | seconds | lines/s | peak MiB | ratio |", "|---:|---:|---:|---:|---:|"]
    for one in measured:
        ratio = one.peak_bytes / measured[0].peak_bytes
        rows.append(
            f"| {one.lines:,} | {one.seconds:.2f} | {one.lines_per_second:,.0f} "
            f"| {one.peak_bytes / _MIB:.1f} | {ratio:.2f} |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each length and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_path")
    parser.add_argument("--lines", type=int, nargs="+", default=DEFAULT_LINES)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        one = run_here(options.one, options.one.with_suffix(".out"), options.lines[0])
        print(one.seconds, one.peak_bytes)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(table([measure(lines, Path(folder)) for lines in options.lines]))


if __name__ == "__main__":
    main()
