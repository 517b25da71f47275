"""The GPU's kernels are compiled beforehand, for every kind of run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_kernel_of_a_run_is_compiled_beforehand() -> None:
    """Runs are greedy, shaped, random or scored, with windows, caps and norms, and not interpreted.

    Models of real shapes run steps on tensors that have no readable numbers.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.model.missing_kernels"],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1", "TIDEMILL_CACHE": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
