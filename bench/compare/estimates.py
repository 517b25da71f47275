"""Accuracy of `tidemill estimate`: its predicted seconds compared with the seconds of a run.

    python -m bench.compare.estimates out/bench/base.jsonl out/bench/a.jsonl … [--sample 96]

Files are run one after the other, with kernels that were compiled before. Each is estimated twice
before it runs: from the files before it, and, without that history, from a sample of its lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bench.compare.compare import read_job
from bench.compare.peers import Job, tidemill, tidemill_command


def run(command: list[str], cache: str) -> str:
    """Run a command with a separate cache folder, and return its output."""
    return subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TIDEMILL_CACHE": cache},
    ).stdout


def estimated(job: Job, cache: str, *flags: str) -> float | None:
    """Return a file's estimated seconds."""
    found = json.loads(run([*tidemill_command("estimate", job), "--json", *flags], cache))
    seconds: float | None = found["seconds"]
    return seconds


def forget_costs(cache: str) -> None:
    """Delete the recorded cost of runs, and nothing else."""
    for entry in Path(cache).glob("remembered/cost-model-*"):
        entry.unlink()


def compared(seconds: float | None, took: float) -> str:
    """Return two cells: an estimate, and its ratio to the actual time."""
    return "not known | " if seconds is None else f"{seconds:.1f} | {seconds / took:.2f}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", type=Path, nargs="+")
    parser.add_argument("--sample", type=int, default=96)
    arguments = parser.parse_args()
    sample = ["--sample", str(arguments.sample)]
    print("| file | took, s | by files before, s | ratio | by a sample, s | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        jobs = [read_job(path, None, "auto") for path in arguments.requests]
        output, alone = ["-o", f"{folder}/rows.jsonl"], f"{folder}/alone"
        run([*tidemill(jobs[0]).command, *output], alone)
        shutil.copytree(alone, f"{folder}/all")
        forget_costs(f"{folder}/all")
        for job in jobs:
            before = estimated(job, f"{folder}/all")
            forget_costs(alone)
            sampled = estimated(job, alone, *sample)
            started = time.monotonic()
            run([*tidemill(job).command, *output], f"{folder}/all")
            took = time.monotonic() - started
            cells = f"{compared(before, took)} | {compared(sampled, took)}"
            print(f"| {job.requests.stem} | {took:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
