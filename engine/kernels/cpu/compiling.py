"""How the CPU's kernels are compiled, and where their machine code is kept.

In a folder named after a digest of all their sources, as kernels inline what others define: below
`NUMBA_CACHE_DIR` where that is set, else in the user's cache folder. It is looked for below
`TIDEMILL_KERNELS`, too, where an image brings what was compiled when it was built.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba import extending

from engine.kernels.cpu.keeping import KeptCode
from engine.sources import digest_of

# What reorders and fuses, but not the leave to take that there are no NaN and no infinity (`nnan`,
# `ninf`): a row that holds one must come out as one, and become an error.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
BROUGHT = "TIDEMILL_KERNELS"

Function = Callable[..., Any]


def folders() -> list[Path]:
    """Return where these kernels' machine code may lie; it is written to the first."""
    found = []
    with suppress(RuntimeError):  # nobody's home
        found.append(_root())
    if brought := os.environ.get(BROUGHT):
        found.append(Path(brought))
    digest = digest_of(Path(__file__).parent)
    return [root / digest for root in found]


def _root() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # As its standard has it, a relative one does not count.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "tidemill" / "kernels"


_folders = folders()


def compiled(function: Function) -> Any:
    """Make a kernel of a function: compiled when first called with arguments of new types."""
    kernel = numba.njit(fastmath=FAST_MATH, nogil=True, error_model="numpy")(function)
    kernel._cache = KeptCode(function, _folders)  # noqa: SLF001 - numba has no other way in
    return kernel


# What is inlined into kernels; what LLVM is told.
inlined: Callable[[Function], Function] = numba.njit(
    fastmath=FAST_MATH, inline="always", error_model="numpy"
)
intrinsic: Callable[[Function], Function] = extending.intrinsic
