"""Machine code in files: read from any cache folder, by concurrent processes, or compiled again."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from tidemill.engine.kernels.cpu import jit_cache
from tidemill.engine.kernels.cpu.jit_cache import JitCache

# Runs of processes, "a,b" one of two dtypes, at once; run by run. Each is a fork of one that has
# imported all, which takes far longer than to compile, and has compiled and read nothing.
ADDS = """
import os, sys; import torch; from numba.core import event
recorded = event.RecordingListener(); event.register("numba:compile", recorded)
from tidemill.engine.kernels.cpu.elementwise import act_and_mul
from tidemill.engine.kernels.elementwise import Gate

def run(dtypes):
    outputs = []
    for dtype in dtypes:
        x = torch.tensor([[1.0, 2.0]], dtype=getattr(torch, dtype))
        outputs.append(f"{act_and_mul(x, Gate()).item():.7f}")
    num_compiled = sum(one.data["dispatcher"].py_func.__module__.startswith("tidemill")
                       and one.is_start for _, one in recorded.buffer)
    os.write(1, f"{','.join(outputs)} {num_compiled}\\n".encode())

for at_once in sys.argv[1:]:
    children = []
    for dtypes in at_once.split():
        child = os.fork()
        if not child:
            try:
                run(dtypes.split(","))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(1)
"""
# silu(1) · 2, by one thread.
PRINTED = {"float32": "1.4621172", "bfloat16": "1.4609375"}


def double(x: Any) -> Any:
    """Return twice a number."""
    return x * 2


def kernel(*folders: Path) -> Any:
    """Return the same function as a kernel that is compiled again, unless a folder has it."""
    made = numba.njit(double)
    made._cache = JitCache(double, folders)
    return made


def misses(kernel: Any) -> int:
    """Return how often a kernel was compiled."""
    return sum(kernel.stats.cache_misses.values())


def test_compiled_code_is_read_by_the_next_process(tmp_path: Path) -> None:
    """Each signature has a separate file."""
    first, second = kernel(tmp_path), kernel(tmp_path)
    assert (first(2), first(2.5), misses(first)) == (4, 5.0, 2)
    assert (second(2), second(2.5), misses(second)) == (4, 5.0, 0)
    assert len(list(tmp_path.iterdir())) == 2


def test_prebuilt_code_is_read_from_its_folder(tmp_path: Path) -> None:
    """An image does this; nothing is written to that folder, which may not even exist."""
    assert kernel(tmp_path / "brought")(2) == 4
    (tmp_path / "file").touch()
    for own in (tmp_path / "own", tmp_path / "file"):
        found = kernel(own, tmp_path / "brought")
        assert (found(2), misses(found)) == (4, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["brought", "file"]


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda _: b"", lambda data: data[::-1]])
def test_a_file_that_is_not_whole_is_none(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    """It is compiled again and written over."""
    kernel(tmp_path)(2)
    [path] = tmp_path.iterdir()
    path.write_bytes(spoil(path.read_bytes()))
    again, after = kernel(tmp_path), kernel(tmp_path)
    assert (again(2), misses(again)) == (4, 1)
    assert (after(2), misses(after)) == (4, 0)


def test_another_version_or_processor_has_separate_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of others are not used, and stay."""
    kernel(tmp_path)(2)
    monkeypatch.setattr(jit_cache, "VERSIONS", "others")
    other = kernel(tmp_path)
    assert (other(2), misses(other)) == (4, 1)
    codegen = type(other.targetctx.codegen())
    monkeypatch.setattr(codegen, "magic_tuple", lambda _: ("another", "processor"))
    elsewhere = kernel(tmp_path)
    assert (elsewhere(2), misses(elsewhere)) == (4, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_compilation_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged if all of it is found."""
    caplog.set_level(logging.INFO, "tidemill.engine.kernels")
    jit_cache._log_once.cache_clear()
    first = kernel(tmp_path)
    first(2)
    first(np.float32(2))
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the CPU's kernels, once on this machine (up to a minute)"
    ]
    jit_cache._log_once.cache_clear()
    caplog.clear()
    kernel(tmp_path)(2)
    assert caplog.records == []


@pytest.mark.long
def test_concurrent_processes_leave_usable_code_for_the_next_one(tmp_path: Path) -> None:
    """One for each dtype and one for both, at kernels that they share; then none compiles."""
    both = ",".join(PRINTED)
    ran = subprocess.run(
        [sys.executable, "-c", ADDS, " ".join([*PRINTED, both]), both],
        env={"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *at_once, after = ran.stdout.splitlines()
    outputs = [line.split()[0] for line in at_once]
    assert sorted(outputs) == sorted([*PRINTED.values(), ",".join(PRINTED.values())])
    assert all(int(line.split()[1]) > 0 for line in at_once)
    assert after == f"{','.join(PRINTED.values())} 0"
    [folder] = tmp_path.iterdir()
    assert all("-" in path.name for path in folder.iterdir())  # no unfinished files are left
