"""The location of kernels' machine code, and the flags that it was compiled with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest

from tidemill.engine.kernels.cpu import (
    elementwise,
    jit_cache,
    linear,
    qkv,
    sampling,
    scalars,
    thread_pool,
    tile_plan,
    tiles,
    top_p,
)
from tidemill.engine.storage.disk_cache import folder_digest

NAME = folder_digest(Path(jit_cache.__file__).parent)


def test_machine_code_is_kept_under_a_digest_of_all_the_kernels_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the user's cache folder or in `NUMBA_CACHE_DIR`; images may bring prebuilt code."""
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TIDEMILL_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jit_cache.cache_folders() == [tmp_path / ".cache/tidemill/kernels" / NAME]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit_cache.cache_folders() == [tmp_path / "xdg/tidemill/kernels" / NAME]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert jit_cache.cache_folders() == [tmp_path / ".cache/tidemill/kernels" / NAME]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("TIDEMILL_KERNELS", str(tmp_path / "image"))
    assert jit_cache.cache_folders() == [tmp_path / "numba" / NAME, tmp_path / "image" / NAME]


def test_this_very_process_uses_it() -> None:
    """All kernels are cached there."""
    for kernel in kernels():
        assert Path(kernel.stats.cache_path).name == NAME


@pytest.fixture(name="printed", scope="module")
def fixture_printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a kernel's result and the number of OpenMP libraries in a process without a cache.

    A file is in the place of the cache's folder.
    """
    file = tmp_path_factory.mktemp("cache") / "file"
    file.touch()
    code = """
import torch
from tidemill.engine.kernels.cpu import elementwise as blocks
print(blocks.rms_norm(torch.zeros(1, 2), torch.ones(2), 1e-6).tolist())
blocks.rms_norm(torch.ones(300, 300), torch.ones(300), 1e-6)
names = {name.rpartition("/")[2] for name in open("/proc/self/maps").read().split()}
print(len({name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))}))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"NUMBA_CACHE_DIR": str(file), "NUMBA_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout.splitlines()


def test_where_nothing_can_be_written_kernels_are_compiled_all_the_same(printed: list[str]) -> None:
    """There is neither a cache nor an error."""
    assert printed[0] == "[[0.0, 0.0]]"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process has loaded")
def test_kernels_do_not_load_a_second_openmp(printed: list[str]) -> None:
    """A process that ran them has torch's OpenMP only: two spin against each other."""
    assert printed[1] == "1"


@pytest.mark.long  # as where nothing can be written, above
def test_where_there_is_no_room_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    """A full disk takes small files, but not the machine code."""
    code = (
        "import resource as r; _, most = r.getrlimit(r.RLIMIT_FSIZE); "
        "r.setrlimit(r.RLIMIT_FSIZE, (1000, most)); "
        "import torch; from tidemill.engine.kernels.cpu import elementwise as blocks; "
        "print(blocks.rms_norm(torch.zeros(1, 2), torch.ones(2), 1e-6).tolist())"
    )
    ran = subprocess.run(
        [sys.executable, "-B", "-c", code],  # byte code would be cut off, too
        env={"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "[[0.0, 0.0]]\n", ran.stderr


def test_no_kernel_may_take_it_that_there_is_no_nan() -> None:
    """NaN must be propagated, but a compiler with such an assumption may drop it."""
    for kernel in (*kernels(), *inlined()):
        assert isinstance(kernel.targetoptions["fastmath"], set)
        assert not kernel.targetoptions["fastmath"] & {"fast", "nnan", "ninf"}


def kernels() -> list[numba.core.dispatcher.Dispatcher]:
    """Return all kernels that are cached."""
    modules = (elementwise, qkv, linear, sampling, tile_plan, thread_pool, top_p, tiles)
    found = [kernel for module in modules for kernel in compiled(module) if not is_inlined(kernel)]
    assert {kernel.__module__ for kernel in found} == {module.__name__ for module in modules}
    return found


def inlined() -> list[numba.core.dispatcher.Dispatcher]:
    """Return the functions that are inlined into others."""
    found = [kernel for module in (scalars, tiles) for kernel in compiled(module)]
    return [kernel for kernel in found if is_inlined(kernel)]


def compiled(module: ModuleType) -> list[numba.core.dispatcher.Dispatcher]:
    """Return the functions that a module compiles with numba."""
    return [
        value
        for value in vars(module).values()
        if hasattr(value, "targetoptions") and value.__module__ == module.__name__
    ]


def is_inlined(kernel: numba.core.dispatcher.Dispatcher) -> bool:
    """Return whether it has no separate machine code."""
    return bool(kernel.targetoptions.get("inline") == "always")
