"""JIT compilation of the CPU kernels by numba, and the on-disk cache of their machine code.

The name of the cache folder is a digest of all kernel sources, as kernels inline each other. It is
below `NUMBA_CACHE_DIR` if that is set, else in the user's cache folder. Kernels that an image was
built with (ahead-of-time) are read from `TIDEMILL_KERNELS`.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import extending
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ...storage.disk_cache import folder_digest

VERSIONS = (sys.version_info[:3], numba.__version__, llvmlite.__version__)

_DIGEST_BYTES = 20
logger = logging.getLogger(__name__)


class JitCache(NullCache):  # type: ignore[misc]  # numba has no types
    """Numba cache of one kernel's machine code: read from all folders, written to the first.

    A folder that cannot be written to is skipped silently.
    """

    def __init__(self, function: Callable[..., Any], cache_folders: Sequence[Path]) -> None:
        self.kernel = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self._folders = cache_folders

    @property
    def cache_path(self) -> str | None:
        """Folder for new files; None without one."""
        return str(self._folders[0]) if self._folders else None

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the cached machine code, or None."""
        name = self._name(signature, target.codegen())
        for folder in self._folders:
            data = _read(folder / name)
            if data is not None:
                target.refresh()
                return CompileResult._rebuild(target, *pickle.loads(data))  # noqa: S301, SLF001 - as numba does; sealed, and from folders of code
        _log_once()
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Save compiled machine code."""
        if self._folders and not result.library.has_dynamic_globals:
            name = self._name(signature, result.codegen)
            data = dumps(result._reduce())  # noqa: SLF001
            with suppress(OSError):  # not writable, or no space
                _write(self._folders[0] / name, data)

    def _name(self, signature: Any, codegen: Any) -> str:
        causes = (str(signature), codegen.magic_tuple(), VERSIONS)
        return f"{self.kernel}-{_digest(repr(causes).encode()).hex()}"


@cache
def _log_once() -> None:
    logger.info("compiling the CPU's kernels, once on this machine (up to a minute)")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _read(path: Path) -> bytes | None:
    """Return the data that `_write` wrote; None if the file is missing or truncated."""
    try:
        read = path.read_bytes()
    except OSError:
        return None
    seal, data = read[:_DIGEST_BYTES], read[_DIGEST_BYTES:]
    return data if seal == _digest(data) else None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, written = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(data) + data)
        Path(written).replace(path)
    except BaseException:
        Path(written).unlink()
        raise


# Reordering and fusing, but not `nnan` and `ninf`, which assume that there is no NaN or infinity: a
# row with one must keep it, and become an error.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
PREBUILT_VARIABLE = "TIDEMILL_KERNELS"

Function = Callable[..., Any]


def cache_folders() -> list[Path]:
    """Return the cache folders of these kernels; the first one is written to."""
    folders = []
    with suppress(RuntimeError):  # the user has no home folder
        folders.append(_root())
    if prebuilt := os.environ.get(PREBUILT_VARIABLE):
        folders.append(Path(prebuilt))
    digest = folder_digest(Path(__file__).parent)
    return [root / digest for root in folders]


def _root() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG standard says to ignore a relative path.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "tidemill" / "kernels"


_folders = cache_folders()


def compiled(function: Function) -> Any:
    """Decorate a kernel: JIT-compiled when first called with new argument types, and cached."""
    kernel = numba.njit(fastmath=FAST_MATH, nogil=True, error_model="numpy")(function)
    kernel._cache = JitCache(function, _folders)  # noqa: SLF001 - numba has no other way in
    return kernel


# Decorators of functions that are inlined into kernels, and of generators of LLVM code.
inlined: Callable[[Function], Function] = numba.njit(
    fastmath=FAST_MATH, inline="always", error_model="numpy"
)
intrinsic: Callable[[Function], Function] = extending.intrinsic
