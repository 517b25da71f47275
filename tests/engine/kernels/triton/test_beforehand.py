"""All kernels compile for the cards that are served, where none of them is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("arch", ["80", "90"])
def test_every_kernel_compiles(arch: str, tmp_path: Path) -> None:
    """In a process of its own, where nothing is interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-m", "engine.kernels.triton.beforehand", arch],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        timeout=600,
    )
    assert any(tmp_path.glob("*/*.cubin"))
