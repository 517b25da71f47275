"""The second run of a file after a hundredth of its lines was edited, by an instant engine.

    python -m bench.kernels.reuse [--lines 10000 1000000] [--s3]

Answers have 128 words. Each run is a separate process: *first* keeps all results, *second* looks
all lines up, runs those that are new and writes the rows, so that its time per line is the cost of
reuse in addition to an engine. *Plain* is the first run without `--reuse`. With `--s3` results are
in a bucket of an emulator on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.compare.compare import machine
from bench.kernels.host_path import NullEngine, peak_bytes
from localstack.ministack import environment_for, running_ministack
from localstack.resources import create_resources
from tidemill import demo
from tidemill.offline.arguments.argument_types import S3Folder, local_or_s3_folder
from tidemill.offline.run.result_folders import result_folder
from tidemill.protocol.contract import Reply

ANSWER = " ".join(f"word{number}" for number in range(128))
EDITED = 100
_MIB = 2**20


class TalkingEngine(NullEngine):
    """Answers every request at once, at length."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer without reading the request."""
        reply = await super().respond(url, body, request_id, created)
        reply.body["choices"][0]["message"]["content"] = ANSWER
        return reply


def write_lines(path: Path, count: int, edit: str = "") -> None:
    """Write requests, of which every hundredth has an edit."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"What is the capital of country number {number}?"
            text += edit if number % EDITED == 0 else ""
            messages = [{"role": "user", "content": text}]
            body = {"model": demo.NAME, "messages": messages, "temperature": 0}
            line = {"custom_id": f"c{number}", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def run_here(path: Path, folder: Path | S3Folder | None) -> None:
    """Run a file in this process; print the seconds and the peak of resident memory."""
    from tidemill.offline.run.job import run_job
    from tidemill.offline.run.run_options import RunOptions

    started = time.perf_counter()
    options = RunOptions(str(path), str(path.with_suffix(".out")), force=True, reuse=folder)
    assert run_job(options, load=lambda *_, **__: TalkingEngine()) == 0
    print(time.perf_counter() - started, peak_bytes())


def rows(count: int, folder: Path, kept: Path | S3Folder) -> Iterator[str]:
    """Yield the rows of the table for a length."""
    first, second = folder / "first.jsonl", folder / "second.jsonl"
    write_lines(first, count)
    write_lines(second, count, " Please.")
    for name, path, flags in (
        ("plain", first, ()),
        ("first", first, ("--folder", str(kept))),
        ("second", second, ("--folder", str(kept))),
    ):
        command = [sys.executable, "-m", "bench.kernels.reuse", "--one", path, *flags]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, peak = map(float, done.stdout.split())
        size = result_folder(kept).num_bytes() if flags else 0
        yield (
            f"| {count:,} | {name} | {seconds:.1f} | {1e6 * seconds / count:.0f} "
            f"| {peak / _MIB:,.0f} | {size / _MIB:,.0f} |"
        )


@contextmanager
def kept_in_s3(folder: Path) -> Iterator[S3Folder]:
    """Yield a prefix in an emulator's bucket, to which AWS's clients are pointed."""
    with running_ministack(folder) as url:
        os.environ.update(environment_for(url))
        yield S3Folder(create_resources(url, prefix="reuse", models=[demo.NAME]).bucket, "kept/")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the files and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.reuse")
    parser.add_argument("--lines", type=int, nargs="+", default=(10_000, 1_000_000))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=local_or_s3_folder, help=argparse.SUPPRESS)
    parser.add_argument("--s3", action="store_true", help="keep results in a bucket")
    options = parser.parse_args(arguments)
    if options.one is not None:
        run_here(options.one, options.folder)
        return
    print("| lines | run | seconds | µs a line | peak MiB | cache MiB |")
    print("|---:|---|---:|---:|---:|---:|")
    for count in options.lines:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder, kept = Path(name), Path(name) / "kept"
            for row in rows(
                count, folder, stack.enter_context(kept_in_s3(folder)) if options.s3 else kept
            ):
                print(row, flush=True)
    print(f"\n{machine()}.")


if __name__ == "__main__":
    main()
