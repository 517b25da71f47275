"""How a run slows down beside other work on its machine, and what its share of the cores would be.

    python -m bench.beside_others out/bench/c.jsonl [--busy 0,2,6,14] [--runs 3]

Others are processes that count for ever. The *share*: with C cores, C threads of ours and B others,
a fair system gives us C / (C + B) of the machine, so a run should take (C + B) / C times as long.
Seconds are those between "can generate" and "all rows done"; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import peers
from bench.compare import read_job
from bench.processes import measure


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes computing."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


def steady_seconds(requests: Path, count: int, runs: int) -> float:
    """Return the median of what a file's rows take beside so many busy processes."""
    peer = peers.tidemill(read_job(requests, None, "bfloat16"))
    seconds = []
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder, busy(count):
        for _ in range(runs):
            command = [*peer.command, "-o", str(Path(folder) / "rows.jsonl")]
            log = Path(folder) / "log"
            seconds.append(measure(command, peer.environment, peer.marks, log).steady_seconds)
    return statistics.median(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", type=Path)
    parser.add_argument("--busy", default="2,6,14", help="comma-separated (%(default)s)")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    alone = steady_seconds(arguments.requests, 0, arguments.runs)
    print("| busy processes | seconds | times as long | by its share |\n|---:|---:|---:|---:|")
    print(f"| 0 | {alone:.1f} | 1 | 1 |")
    for count in map(int, arguments.busy.split(",")):
        seconds = steady_seconds(arguments.requests, count, arguments.runs)
        print(
            f"| {count} | {seconds:.1f} | {seconds / alone:.1f} | {(cores + count) / cores:.1f} |"
        )


if __name__ == "__main__":
    main()
