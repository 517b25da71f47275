"""Everything that takes a GPU to know, in one call of less than nine minutes.

    python -m bench.gpu.gpu [--results FILE] [--seconds 520] [--only rows,speed]

Nothing is downloaded: models are random weights of known shapes, made on the card. Each part runs
in a process of its own within a time of its own; what it has found so far is kept whatever becomes
of it. A second call with the same file does what is missing or failed. `--tiny` does all of it on a
CPU in seconds of work, where Triton's kernels are interpreted: it proves this script, not the
kernels, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.parts.report import report
from bench.gpu.parts.task import Numbers, Place, Task

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy")
TINY_SECONDS = 300
# What a part is given to go by.
FOUND = "found.json"


class Part(NamedTuple):
    """A module of `bench.gpu.parts`, and the seconds that it may take."""

    name: str
    seconds: float


PARTS = (
    Part("ceilings", 30),
    Part("accuracy", 60),
    Part("speed", 60),
    Part("rows", 40),
    Part("generation", 200),
    Part("peers", 90),
    Part("sanitizer", 60),
)


class Results:
    """Results, in a file that is complete at any moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: dict[str, Any] = {"parts": {}}
        if path.exists():
            self.all = json.loads(path.read_text(encoding="utf-8"))

    def found(self, part: str) -> dict[str, Numbers]:
        """Return what each task of a part gave, or what it failed with."""
        tasks: dict[str, Numbers] = self.all["parts"].setdefault(part, {}).setdefault("tasks", {})
        return tasks

    def note(self, part: str, **status: object) -> None:
        """Keep how a part went."""
        self.all["parts"].setdefault(part, {}).update(status)
        self.write()

    def write(self) -> None:
        """Write the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.all, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(self._path)


def surroundings() -> dict[str, Any]:
    """Return card, versions and command."""
    import torch

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    card: dict[str, Any] = {"name": "none: interpreted on a CPU"}
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        card = {
            "name": found.name,
            "bytes": found.total_memory,
            "capability": f"{found.major}.{found.minor}",
            "processors": found.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return {"card": card, "versions": versions, "command": " ".join(sys.argv)}


def run_part(part: Part, results: Results, folder: Path, *, is_tiny: bool, seconds: float) -> None:
    """Run a part in a process of its own, and take in what it found until it ended."""
    (folder / FOUND).write_text(
        json.dumps({name: results.found(name) for name in results.all["parts"]}), encoding="utf-8"
    )
    command = [sys.executable, "-m", "bench.gpu.gpu", "--part", part.name, "--folder", str(folder)]
    environment = dict(os.environ)
    if is_tiny:
        command.append("--tiny")
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    log = folder / f"{part.name}.log"
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=file, timeout=seconds, check=False, env=environment
            ).returncode
            status = "done" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            status = f"ran out of {seconds:.0f} s"
    store_cross_attention(part, results, folder)
    took = time.monotonic() - started
    end = log.read_text(encoding="utf-8")[-2000:] if status != "done" else ""
    results.note(part.name, status=status, seconds=round(took, 1), log=end)


def store_cross_attention(part: Part, results: Results, folder: Path) -> None:
    """Add what a part has written, a line for each task."""
    new = folder / f"{part.name}.jsonl"
    if not new.exists():
        return
    for line in new.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        results.found(part.name)[record.pop("task")] = record
    results.write()
    new.unlink()


def work(part: str, folder: Path, *, is_tiny: bool) -> None:
    """Do the tasks of a part that are not done yet, a line for each; in the part's own process."""
    import torch

    found = json.loads((folder / FOUND).read_text(encoding="utf-8"))
    place = Place(torch.device("cpu" if is_tiny else "cuda"), is_tiny, found)
    with interpreting() if is_tiny else nullcontext(), (folder / f"{part}.jsonl").open("a") as file:
        for task in import_module(f"bench.gpu.parts.{part}").tasks(place):
            if is_done(found.get(part, {}).get(task.name)):
                continue
            print(task.name, flush=True)
            file.write(json.dumps({"task": task.name, **attempt(task)}) + "\n")
            file.flush()


@contextmanager
def interpreting() -> Iterator[None]:
    """Let a CPU be served by Triton's kernels."""
    from tidemill.engine.kernels.backends import TRITON_TYPES

    TRITON_TYPES.add("cpu")
    try:
        yield
    finally:
        TRITON_TYPES.remove("cpu")


def attempt(task: Task) -> Numbers:
    """Return what a task gives, or what it fails with: the next may go well."""
    started = time.monotonic()
    try:
        numbers = task.call()
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is written down
        numbers = {"error": f"{type(exc).__name__}: {exc}"[:2000]}
    return {**numbers, "took_seconds": round(time.monotonic() - started, 2)}


def is_done(record: Mapping[str, Any] | None) -> bool:
    """Say whether a task need not be done again."""
    return record is not None and "error" not in record


def missing(only: frozenset[str], results: Results) -> Iterator[Part]:
    """Yield the parts that are asked for and not done, whole and without an error."""
    for part in PARTS:
        if only and part.name not in only:
            continue
        status = results.all["parts"].get(part.name, {}).get("status")
        if status != "done" or not all(map(is_done, results.found(part.name).values())):
            yield part


def main() -> None:
    """Run all parts that are missing, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="a file; what it holds is not done again")
    parser.add_argument("--seconds", type=float, default=520, help="for all (%(default)s)")
    parser.add_argument("--only", default="", help="parts, comma-separated")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to try this script")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        work(arguments.part, arguments.folder, is_tiny=arguments.tiny)
        return
    around = surroundings()
    if "bytes" not in around["card"] and not arguments.tiny:
        raise SystemExit("there is no GPU here; --tiny tries the script on a CPU")
    name = "-".join(around["card"]["name"].lower().split())
    path = arguments.results or RESULTS / f"{'tiny' if arguments.tiny else name}.json"
    results, ends = Results(path), time.monotonic() + arguments.seconds
    results.all.update(around)
    folder = path.parent / f"{path.stem}.work"
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:  # what was cut off with a call before
        store_cross_attention(part, results, folder)
    for part in missing(frozenset(filter(None, arguments.only.split(","))), results):
        left = min(ends - time.monotonic(), TINY_SECONDS if arguments.tiny else part.seconds)
        if left <= 0:
            results.note(part.name, status="there was no time left")
            continue
        print(f"{part.name}: up to {left:.0f} s", flush=True)
        run_part(part, results, folder, is_tiny=arguments.tiny, seconds=left)
        print(f"  {results.all['parts'][part.name]['status']}", flush=True)
    for line in report(results.all):
        print(line)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
