"""The GPU's kernels compiled beforehand: what a run of any kind asks for is among them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_run_asks_for_a_kernel_that_is_not_compiled_beforehand() -> None:
    """Greedy, shaped, random, scored; windows, caps, norms; in a process that interprets nothing.

    And models of real shapes get through steps on tensors that nobody can ask for a number.
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
