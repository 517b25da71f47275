"""How the CPU's kernels are compiled: once a machine, and again when their sources change.

numba keeps machine code on disk, but looks for a change in a kernel's own file only, where kernels
inline what others define. So it is kept in a folder named after a digest of all of them: below
`NUMBA_CACHE_DIR` where that is set, else in the user's cache folder. Where neither can be written,
every process compiles for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numba
from numba import extending

from engine.sources import digest_of

# What reorders and fuses, but not the leave to take that there are no NaN and no infinity (`nnan`,
# `ninf`): a row that holds one must come out as one, and become an error.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
# More than a model's kernels take: what numba cannot write, it raises from the first call.
_ROOM_BYTES = 2**22


def make_folder() -> Path | None:
    """Return the folder that these kernels' machine code is kept in; None where none can be."""
    try:
        folder = _root() / digest_of(Path(__file__).parent)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as trial:
            trial.write(bytes(_ROOM_BYTES))
    except (OSError, RuntimeError):  # not to be written, no room, or nobody's home
        return None
    return folder


def _root() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # As its standard has it, a relative one does not count.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "tidemill" / "kernels"


_folder = make_folder()
if _folder is not None:
    numba.config.CACHE_DIR = str(_folder)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
# A kernel; one whose `prange` runs on all threads; what is inlined into kernels; what LLVM is told.
compiled: Decorator = numba.njit(
    fastmath=FAST_MATH, nogil=True, cache=_folder is not None, error_model="numpy"
)
parallel: Decorator = numba.njit(
    parallel=True, fastmath=FAST_MATH, nogil=True, cache=_folder is not None, error_model="numpy"
)
inlined: Decorator = numba.njit(fastmath=FAST_MATH, inline="always", error_model="numpy")
intrinsic: Decorator = extending.intrinsic
