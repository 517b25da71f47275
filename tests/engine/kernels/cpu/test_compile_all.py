"""All kernels compiled beforehand: what a run of any kind calls is among them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.engine.kernels.cpu import compile_all


def test_no_run_calls_a_kernel_that_is_not_compiled_beforehand(tmp_path: Path) -> None:
    """Greedy, shaped, random, scored; sharing; all forms of attention; by ours and transformers."""
    # A second thread has its kernel, too; on a busy machine torch's would spin in each other's way.
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.cpu.runs", str(tmp_path)],
        # A remembered parity check would not be made.
        env={**os.environ, **threads, "TIDEMILL_CACHE": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8").count("\n") == 27


def test_bf16_is_compiled_where_a_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere models run in fp32 alone."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    for has_it, count in ((True, 2), (False, 1)):
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda has_it=has_it: has_it)
        assert len(compile_all.dtypes()) == count
        assert len(compile_all.jobs()) == 4 * count + 2
