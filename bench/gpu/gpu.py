"""All measurements that need a GPU, in one call of less than ten minutes.

    python -m bench.gpu.gpu [--results FOLDER] [--seconds 570] [--only attention,step]

Nothing is downloaded: models are random weights of known shapes, made on the card, and the demo
model of this repository. Each part runs in separate processes until its time limit. For each task
that ends, a line is printed and a record is in FOLDER/results.jsonl, whatever happens to the next.
A second call with the same folder runs missing and failed tasks. `--tiny` runs all of it on a CPU
with tiny shapes, where Triton's kernels are interpreted: it tests this script, not the kernels, and
its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.gpu.parts.report import report
from bench.gpu.results import WHOLE, Results, is_complete, is_done
from bench.gpu.work import BROKEN, LEFT, Claims

RESULTS = Path(__file__).parents[1] / "results"
SECONDS = 570.0
TINY_SECONDS = 1800.0
# Seconds between two checks of processes, and from the end of a part's time until they are killed.
LOOK_SECONDS, GRACE_SECONDS = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Part:
    """A module with `tasks`: its share of the time, and how many processes do its tasks.

    It starts when the one before has ended or, if `is_concurrent`, together with that.
    """

    name: str
    seconds: float
    processes: int = 1
    is_concurrent: bool = False
    module: str = ""

    @property
    def path(self) -> str:
        """Return the module's full name."""
        return self.module or f"bench.gpu.parts.{self.name}"


PARTS = (
    Part("versions", 10),
    # Kernels compile on all cores; Triton's cache keeps the results.
    Part("accuracy", 60, processes=12),
    Part("rows", 60, is_concurrent=True),
    Part("ceilings", 8),
    Part("launches", 8),
    Part("attention", 25),
    Part("counters", 25),
    Part("generation", 225),
    Part("encoders", 25),
    Part("files", 80),
    Part("tiles", 100),
)
# Known numbers: parts that run if they are named.
EXTRA = (Part("speed", 10), Part("experts", 60))


@dataclass(slots=True)
class Running:
    """A part with running processes: those that end before their time are replaced."""

    part: Part
    results: Results
    claims_folder: Path
    until: float
    is_tiny: bool
    started: float = field(default_factory=time.monotonic)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    status: str = "done"

    def start(self) -> None:
        """Start all processes."""
        count = min(self.part.processes, 2) if self.is_tiny else self.part.processes
        for _ in range(count):
            self.start_one()

    def start_one(self) -> None:
        """Start a process, which prints here; its errors go to the log."""
        command = [sys.executable, "-m", "bench.gpu.work", self.part.name, self.part.path]
        command += ["--results", str(self.results.folder), "--claims", str(self.claims_folder)]
        command += ["--until", str(self.until)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.part.processes > 1:  # they share the processors
            environment["OMP_NUM_THREADS"] = "1"
        if self.is_tiny:
            command.append("--tiny")
            environment["TRITON_INTERPRET"] = "1"
        with (self.results.folder / "log.txt").open("ab") as log:
            self.processes.append(
                subprocess.Popen(command, stderr=log, env=environment, start_new_session=True)
            )

    def look(self) -> bool:
        """Handle processes that have ended; return whether any runs."""
        if time.monotonic() > self.until + GRACE_SECONDS:
            self.stop(f"cut off after {self.until - self.started:.0f} s")
        for process in list(self.processes):
            code = process.poll()
            if code is None:
                continue
            self.processes.remove(process)
            if code == LEFT:
                self.status = "not enough time for all tasks"
            elif code != 0:
                was_at = self.fail(process, f"its process ended with {code}")
                if was_at or code == BROKEN:
                    self.start_one()
                else:
                    self.status = f"its process ended with {code}"
        return bool(self.processes)

    def fail(self, process: subprocess.Popen[bytes], why: str) -> bool:
        """Record why a process's task has not ended; return whether there is one."""
        claims = Claims(self.claims_folder)
        tasks = claims.held_by(process.pid)
        for task in tasks:
            self.results.append(self.part.name, task, {"error": why})
            claims.release(task)
            print(f"{self.part.name}: {task}: **failed**: {why}", flush=True)
        return bool(tasks)

    def stop(self, why: str) -> None:
        """Kill running processes and their children."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may block it for a while
                process.wait(GRACE_SECONDS)
            self.fail(process, why)
            self.status = why
        self.processes.clear()

    def end(self) -> None:
        """Record the outcome of the part."""
        seconds = round(time.monotonic() - self.started, 1)
        records = self.results.read().get(self.part.name, {})
        failed = [task for task, record in records.items() if not is_done(record)]
        if self.status == "done" and failed:
            self.status = f"{len(failed)} tasks failed"
        self.results.append(self.part.name, WHOLE, {"status": self.status, "seconds": seconds})
        print(f"{self.part.name}: {self.status}, {seconds:.0f} s", flush=True)


def run_all(
    parts: Sequence[Part], results: Results, seconds: float, *, is_tiny: bool = False
) -> None:
    """Run the missing tasks of these parts within `seconds`.

    Time that one part does not need goes to those after it; if few are missing, each has more.
    """
    results.open()
    found = results.read()
    missing = [part for part in parts if not is_complete(found.get(part.name, {}))]
    groups = list(grouped(missing))
    shares = [max(part.seconds for part in group) for group in groups]
    scale = seconds / max(1.0, sum(shares))
    ends = time.monotonic()
    for group, share in zip(groups, shares, strict=True):
        ends += share * scale
        run_group(group, results, ends, is_tiny=is_tiny)


def grouped(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts that run at the same time."""
    group: list[Part] = []
    for part in parts:
        if group and not part.is_concurrent:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def run_group(group: Sequence[Part], results: Results, until: float, *, is_tiny: bool) -> None:
    """Run parts concurrently until a time of the monotonic clock."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for part in group:
            claims = Path(folder) / part.name
            claims.mkdir()
            running.append(Running(part, results, claims, until - GRACE_SECONDS, is_tiny))
        try:
            for one in running:
                one.start()
            alive = list(running)
            while alive:
                time.sleep(LOOK_SECONDS)
                for one in list(alive):
                    if not one.look():
                        one.end()
                        alive.remove(one)
        finally:
            for one in running:
                one.stop("stopped from outside")


def main() -> None:
    """Run all missing parts, and print the findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, help="write results to this folder; results in it are not repeated"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"limit the seconds for all parts (default: {SECONDS:.0f})"
    )
    parser.add_argument("--only", default="", help="run only these parts, comma-separated")
    parser.add_argument(
        "--tiny", action="store_true", help="run tiny shapes on a CPU, to try this script"
    )
    options = parser.parse_args()
    results = Results(options.results or RESULTS / ("tiny" if options.tiny else "gpu"))
    only = set(filter(None, options.only.split(",")))
    known = [*PARTS, *EXTRA]
    if unknown := only - {part.name for part in known}:
        parser.error(f"unknown part {min(unknown)}: choose from {', '.join(p.name for p in known)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no GPU found: use --tiny to try the script on a CPU")
    seconds = options.seconds or (TINY_SECONDS if options.tiny else SECONDS)
    parts = [part for part in known if part.name in only] if only else PARTS
    try:
        run_all(parts, results, seconds, is_tiny=options.tiny)
    finally:
        text = "\n".join(report(results.read())) + "\n"
        (results.folder / "report.md").write_text(text, encoding="utf-8")
        print(f"{results.folder}/report.md has it as tables", flush=True)


if __name__ == "__main__":
    main()
