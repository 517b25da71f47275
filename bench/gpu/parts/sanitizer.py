"""compute-sanitizer over every kernel's check on small shapes: reads and writes out of bounds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.gpu.parts.task import Numbers, Place, Task

TOOLS = ("memcheck", "racecheck")
ELSEWHERE = Path("/usr/local/cuda/bin/compute-sanitizer")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def tasks(place: Place) -> Iterator[Task]:
    """Yield each tool."""
    for tool in TOOLS:
        yield Task(tool, partial(sanitized, place, tool))


def sanitized(place: Place, tool: str) -> Numbers:
    """Run the checks of `accuracy` under a tool, each tensor in separate memory."""
    found = shutil.which("compute-sanitizer") or (str(ELSEWHERE) if ELSEWHERE.exists() else None)
    if found is None or place.is_tiny:
        return {"skipped": "compute-sanitizer is not installed" if found is None else "no GPU"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "found.json").write_text(json.dumps({}), encoding="utf-8")
        command = [found, "--tool", tool, sys.executable, "-m", "bench.gpu.gpu"]
        completed = subprocess.run(
            [*command, "--part", "accuracy", "--folder", folder],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = (Path(folder) / "accuracy.jsonl").read_text(encoding="utf-8").splitlines()
    summaries = SUMMARY.findall(completed.stdout + completed.stderr)
    if not summaries:
        raise RuntimeError(
            f"the tool printed no summary: {completed.stderr[-500:] or completed.stdout[-500:]}"
        )
    return {"errors": int(summaries[-1]), "checks": len(lines), "holds": summaries[-1] == "0"}
