"""Hardware counters of three kernels by `ncu`, if it is installed and may read them."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.parts import attention
from bench.gpu.parts.attention import SHAPE_06B, SHAPE_8B, Case
from bench.gpu.parts.task import Numbers, Place, Task

CASES = {
    "decodes": Case(SHAPE_8B, 256, 1024),
    "prefill": Case(SHAPE_8B, 1, 4096, 4096),
    "decodes of 0.6B": Case(SHAPE_06B, 512, 512),
}
METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__occupancy_limit_registers",
)
SECONDS = 8.0


def tasks(_place: Place) -> Iterator[Task]:
    """Yield each kernel."""
    for name in CASES:
        yield Task(name, partial(counted, _place, name), SECONDS)


def counted(place: Place, name: str) -> Numbers:
    """Return the counters of attention's kernel in one case."""
    program = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if place.is_tiny or program is None:
        return {"skipped": "no GPU" if place.is_tiny else "ncu is not installed"}
    command = [program, "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", "_attend_tiles", "--launch-skip", "2", "--launch-count", "1"]
    command += [sys.executable, "-m", "bench.gpu.parts.counters", name]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ, timeout=4 * SECONDS
    )
    return parsed(ran.stdout) or {"skipped": f"{ran.stdout} {ran.stderr}".strip()[-300:]}


def parsed(output: str) -> Numbers:
    """Return the counters in a program's output, by name."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    read = csv.DictReader(lines)
    values = {row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}" for row in read}
    return {"summary": ", ".join(f"{k} {v.strip()}" for k, v in values.items())} if values else {}


def main() -> None:
    """Launch the kernel of one case some times."""
    place = Place(torch.device("cuda"), is_tiny=False, found={})
    call = attention.prepared(place, CASES[sys.argv[1]])
    for _ in range(4):
        call()
    place.wait()


if __name__ == "__main__":
    main()
