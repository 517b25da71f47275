"""Kernels are launched without a compiler if they were compiled before; else there is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.engine.kernels.triton import driver as tested
from tidemill.engine.kernels.triton.driver import LIBRARY, launch_problem, make_stub_library

ROOT = Path(__file__).parents[4]
BUILD = """
from tidemill.engine.kernels.triton.driver import compile_module
from tidemill.engine.kernels.triton.launch import compile_only
from tests.engine.kernels.triton import launched
compile_module()
with compile_only(90):
    launched.run()
"""
# Returned numbers are large enough, but not larger than Triton believes, and pointers are not null.
BODY = "extern int puts(const char *); puts(__func__); if (out) *(int *)out = 1 << 17; return 0;"


def python(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with only the given environment."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_a_compiler_a_kernel_is_launched_with_the_prebuilt_launcher(tmp_path: Path) -> None:
    """The image works this way: nothing is compiled or written, and the driver gets the launches.

    The second one does not go through Triton's own call.
    """
    brought, own, library = (tmp_path / name for name in ("brought", "own", "library"))
    built = python(
        {"PATH": os.environ["PATH"], "TRITON_CACHE_DIR": str(brought / "triton")}, "-c", BUILD
    )
    assert built.returncode == 0, built.stderr
    assert "Warning" not in built.stderr
    library.mkdir()
    make_stub_library(library, BODY)
    before = {path: path.stat().st_mtime_ns for path in brought.rglob("*")}
    ran = python(
        {
            "PATH": str(tmp_path / "none"),
            "LD_LIBRARY_PATH": str(library),
            "TIDEMILL_KERNELS": str(brought),
            "TRITON_CACHE_DIR": str(own),
        },
        *("-m", "tests.engine.kernels.triton.launched"),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split().count("cuLaunchKernelEx") == 2
    assert not own.exists()
    assert {path: path.stat().st_mtime_ns for path in brought.rglob("*")} == before
    assert "compiling" not in ran.stderr


class Broken:
    """Stub of Triton's drivers that cannot be created."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def active(self) -> None:
        """Raise the error."""
        raise self._error


REASONS = {
    "install gcc": RuntimeError("Failed to find C compiler. Please specify via CC"),
    "python3-dev": subprocess.CalledProcessError(1, "gcc"),
    LIBRARY: AssertionError("libcuda.so cannot found!"),
    "0 active drivers": RuntimeError("0 active drivers ([]). There should only be one."),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_why_kernels_cannot_be_launched_is_reported(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message contains a remedy."""
    monkeypatch.setattr(tested, "driver", Broken(REASONS[reason]))
    assert reason in (launch_problem() or "")
