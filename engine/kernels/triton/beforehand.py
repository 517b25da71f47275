"""`python -m engine.kernels.triton.beforehand 80 90`: compiles the kernels for these architectures.

Whoever builds an image calls it; no card is needed, but a C compiler. What is made lies where
TRITON_CACHE_DIR says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from engine.kernels.triton import blocks
from engine.kernels.triton.driver import compile_module
from engine.kernels.triton.launching import compiling_for

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16)
HIDDEN = 4096


def norms(dtype: torch.dtype) -> None:
    """Call each norm."""
    blocks.rms_norm(torch.empty(2, HIDDEN, dtype=dtype), torch.empty(HIDDEN, dtype=dtype), 1e-6)


# Each calls what a run calls, in the forms that it may call it in.
CALLS: tuple[Callable[[torch.dtype], None], ...] = (norms,)


def compile_all(arch: int) -> None:
    """Compile every kernel for an architecture, in each dtype that models are served in."""
    with compiling_for(arch):
        for dtype in DTYPES:
            for call in CALLS:
                call(dtype)


if __name__ == "__main__":
    compile_module()
    for asked in sys.argv[1:]:
        compile_all(int(asked))
