"""Machine code of kernels, kept in files: one for each kernel, signature and kind of processor.

A file's name holds all that its code follows from, and it appears whole or not at all. So processes
that start at once on a new machine write the same or nothing of each other's, and what another
version, processor or set of sources has left is never met. numba's own files have an index beside
them, which two processes at once can leave pointing at one another's code; and where numba cannot
write it does not read.
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
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

VERSIONS = (sys.version_info[:3], numba.__version__, llvmlite.__version__)

_DIGEST_BYTES = 20
logger = logging.getLogger(__name__)


class KeptCode(NullCache):  # type: ignore[misc]  # numba has no types
    """What numba asks for a kernel's machine code, and gives it to when it has compiled some.

    It is looked for in all folders and written to the first; where that cannot be, nothing is.
    """

    def __init__(self, function: Callable[..., Any], folders: Sequence[Path]) -> None:
        self.kernel = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self._folders = folders

    @property
    def cache_path(self) -> str | None:
        """Where it is written; None where there is no place."""
        return str(self._folders[0]) if self._folders else None

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return what was compiled before, or None."""
        name = self._name(signature, target.codegen())
        for folder in self._folders:
            data = _read(folder / name)
            if data is not None:
                target.refresh()
                return CompileResult._rebuild(target, *pickle.loads(data))  # noqa: S301, SLF001 - as numba does; sealed, and from folders of code
        _tell_once()
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep what was compiled."""
        if self._folders and not result.library.has_dynamic_globals:
            name = self._name(signature, result.codegen)
            data = dumps(result._reduce())  # noqa: SLF001
            with suppress(OSError):  # not to be written, or no room
                _write(self._folders[0] / name, data)

    def _name(self, signature: Any, codegen: Any) -> str:
        causes = (str(signature), codegen.magic_tuple(), VERSIONS)
        return f"{self.kernel}-{_digest(repr(causes).encode()).hex()}"


@cache
def _tell_once() -> None:
    logger.info("compiling the CPU's kernels, once on this machine (up to a minute)")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _read(path: Path) -> bytes | None:
    """Return what `_write` wrote; None where there is nothing, or not all of it."""
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
