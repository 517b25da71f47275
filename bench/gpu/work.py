"""A part of `bench.gpu.gpu` in a separate process: task after task, while there is time.

    python -m bench.gpu.work NAME MODULE --results FOLDER --claims FOLDER --until SECONDS [--tiny]

Processes of one part share its tasks: each is claimed by a file before it starts, so that the
parent process can identify the task that crashed it. The exit status is 0 when no task was left,
`LEFT` when there was no room for one, and `BROKEN` when the device takes no more work from this
process.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from urllib.parse import quote, unquote

import torch

from bench.gpu.parts.report import figures
from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.results import Results, is_done

LEFT, BROKEN = 3, 4
DONE = "done"


class Claims:
    """Claims on a part's tasks in a folder: who has which, and which are done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claim(self, task: str) -> bool:
        """Take a task, unless another process has it."""
        try:
            with self._file(task).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True

    def release(self, task: str) -> None:
        """Say that a task is done."""
        self._file(task).write_text(DONE)

    def held_by(self, process: int) -> list[str]:
        """Return the tasks that a process has not ended."""
        return [
            unquote(path.name)
            for path in self._folder.iterdir()
            if path.read_text() == str(process)
        ]

    def _file(self, task: str) -> Path:
        return self._folder / quote(task, safe="")


def work(
    part: str, module: str, results: Results, claims: Claims, until: float, *, is_tiny: bool
) -> int:
    """Run the missing tasks of a part; return the exit status."""
    found = results.read()
    place = Place(torch.device("cpu" if is_tiny else "cuda"), is_tiny, found, until)
    has_left, parent = False, os.getppid()
    with interpreting() if is_tiny else nullcontext():
        for task in import_module(module).tasks(place):
            if is_done(found.get(part, {}).get(task.name)):
                continue
            if os.getppid() != parent:  # an orphan would not be stopped
                return LEFT
            if time.monotonic() + (0 if is_tiny else task.seconds) > until:
                print(f"{part}: {task.name}: there is no room for {task.seconds:.0f} s", flush=True)
                has_left = True
                continue
            if not claims.claim(task.name):
                continue
            numbers = attempt(task)
            results.append(part, task.name, numbers)
            claims.release(task.name)
            line = f"{part}: {task.name}: {numbers['took_seconds']:.1f} s; {figures(numbers)}"
            print(line, flush=True)
            if "error" in numbers and is_broken(place):
                return BROKEN
    return LEFT if has_left else 0


def attempt(task: Task) -> Numbers:
    """Return a task's result, or its error: the next one may succeed."""
    started = time.monotonic()
    try:
        numbers = task.call()
    except Exception as exc:  # noqa: BLE001 - every error is recorded
        numbers = {"error": f"{type(exc).__name__}: {exc}"[:2000]}
    return {**numbers, "took_seconds": round(time.monotonic() - started, 2)}


def is_broken(place: Place) -> bool:
    """Return whether a task has left the device unusable, as after an illegal memory access."""
    try:
        place.wait()
        torch.ones(1, device=place.device)
    except RuntimeError:
        return True
    return False


@contextmanager
def interpreting() -> Iterator[None]:
    """Let Triton's kernels run on a CPU."""
    from tidemill.engine.kernels.backends import TRITON_TYPES

    TRITON_TYPES.add("cpu")
    try:
        yield
    finally:
        TRITON_TYPES.remove("cpu")


def main() -> int:
    """Parse the command line and work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part")
    parser.add_argument("module")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--claims", type=Path, required=True)
    parser.add_argument(
        "--until", type=float, required=True, help="stop at this time of the monotonic clock"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    results, claims = Results(options.results), Claims(options.claims)
    return work(options.part, options.module, results, claims, options.until, is_tiny=options.tiny)


if __name__ == "__main__":
    sys.exit(main())
