"""compute-sanitizer's memcheck over the checks of eight kernels: accesses out of bounds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.gpu.parts.task import Numbers, Place, Task

# Checks of `accuracy`, by name.
CHECKS = (
    "norms, bfloat16",
    "gate silu, bfloat16",
    "attention 8B, bfloat16",
    "attention gpt-oss, bfloat16",
    "choice, bfloat16",
    "log-probabilities, bfloat16",
    "experts of 352, bfloat16",
    "4-bit product, bfloat16",
)
ELSEWHERE = Path("/usr/local/cuda/bin/compute-sanitizer")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+)")
USUAL_SECONDS = 20.0
SPARE_SECONDS = 1.0
# Each tensor has separate memory, so that an access after its end is out of bounds.
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
CHECK = """
import sys, torch
from bench.gpu.parts.accuracy import tasks
from bench.gpu.parts.task import Place
place = Place(torch.device("cuda"), False, {})
[task] = [task for task in tasks(place) if task.name == sys.argv[1]]
print(task.call())
"""


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, None if there is none."""
    found = shutil.which("compute-sanitizer")
    return found or (str(ELSEWHERE) if ELSEWHERE.exists() else None)


def tasks(place: Place) -> Iterator[Task]:
    """Yield a run for each check."""
    for check in CHECKS:
        yield Task(check, partial(checked, place, check), USUAL_SECONDS)


def checked(place: Place, check: str) -> Numbers:
    """Run a check under memcheck in a separate process, within the time left."""
    command = sanitizer()
    if command is None or place.is_tiny:
        return {"skipped": "no GPU" if place.is_tiny else "compute-sanitizer is not installed"}
    completed = subprocess.run(
        [command, "--tool", "memcheck", sys.executable, "-c", CHECK, check],
        env={**os.environ, **ALONE},
        capture_output=True,
        text=True,
        check=False,
        timeout=max(SPARE_SECONDS, place.until - time.monotonic() - SPARE_SECONDS),
    )
    summaries = SUMMARY.findall(completed.stdout + completed.stderr)
    if not summaries:
        raise RuntimeError(
            f"memcheck printed no summary: {completed.stderr[-500:] or completed.stdout[-500:]}"
        )
    if completed.returncode:
        errors = [line for line in completed.stdout.splitlines() if "====" in line][:20]
        return {"errors": int(summaries[-1]), "holds": False, "first": "\n".join(errors)}
    return {"errors": int(summaries[-1]), "holds": summaries[-1] == "0"}
