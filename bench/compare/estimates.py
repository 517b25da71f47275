"""What `tidemill estimate` says of files, beside what `tidemill run` then takes.

    python -m bench.compare.estimates out/bench/base.jsonl out/bench/a.jsonl … [--sample 96]

Files are run one after the other, with kernels that were compiled before. Each is estimated twice
before: by what the files before it cost, and where nothing is known by so many of its own lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.compare.peers import MAX_MODEL_LEN


def tidemill(command: str, requests: Path, cache: str, *flags: str) -> str:
    """Run a command on a file and return its output; the model of its lines lies beside it."""
    name = json.loads(requests.read_text(encoding="utf-8").partition("\n")[0])["body"]["model"]
    model = ["--model", str(requests.parent / name), "--served-model-name", name]
    model += ["--max-model-len", str(MAX_MODEL_LEN)]
    words = [sys.executable, "-m", "tidemill.cli.main", command, "-i", str(requests)]
    return subprocess.run(
        [*words, *model, *flags],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TIDEMILL_CACHE": cache},
    ).stdout


def estimated(requests: Path, cache: str, *flags: str) -> float | None:
    """Return the seconds that a file is estimated to take."""
    found = json.loads(tidemill("estimate", requests, cache, "--json", *flags))
    seconds: float | None = found["seconds"]
    return seconds


def forget_costs(cache: str) -> None:
    """Forget what runs cost, and nothing else."""
    for entry in Path(cache).glob("remembered/cost-model-*"):
        entry.unlink()


def told(seconds: float | None, took: float) -> str:
    """Return two cells: an estimate, and its ratio to what it took."""
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
        rows, alone = ("-o", f"{folder}/rows.jsonl", "--force"), f"{folder}/alone"
        tidemill("run", arguments.requests[0], alone, *rows)
        shutil.copytree(alone, f"{folder}/all")
        forget_costs(f"{folder}/all")
        for requests in arguments.requests:
            before = estimated(requests, f"{folder}/all")
            forget_costs(alone)
            sampled = estimated(requests, alone, *sample)
            started = time.monotonic()
            tidemill("run", requests, f"{folder}/all", *rows)
            took = time.monotonic() - started
            cells = f"{told(before, took)} | {told(sampled, took)}"
            print(f"| {requests.stem} | {took:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
