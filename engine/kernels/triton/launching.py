"""How a kernel is launched: run on tensors, or only compiled, for a card that need not be here.

Both go by the same functions, so that what an image has compiled is what a run asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.kernels.triton.choices import Choice

# Of the numbers that kernels take.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What kernels are compiled for and not run on, while that is so.
_compiled_for: GPUTarget | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, choice: Choice, **constants: Any) -> Any:
    """Run a kernel over a grid of programs; of an empty grid nothing comes.

    While kernels are only compiled, it is compiled, and returned as Triton returns it.
    """
    options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
    if _compiled_for is not None:
        return kernel.warmup(*args, grid=grid, **choice.sizes, **constants, **options)
    if all(grid):
        kernel[grid](*args, **choice.sizes, **constants, **options)
    return None


def arch_of(device: torch.device) -> str:
    """Return what a device's kernels are compiled for, as "sm_90"; a CPU's are interpreted."""
    if _compiled_for is not None:
        return f"sm_{_compiled_for.arch}"
    return "interpreter" if device.type == "cpu" else _arch_of(device.index)


@cache
def _arch_of(index: int | None) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@contextmanager
def compiling_for(arch: int) -> Iterator[None]:
    """Let kernels be compiled for an architecture such as 90 instead of run; tensors lie anywhere.

    What is there already, in Triton's cache, is found and not made again.
    """
    global _compiled_for  # noqa: PLW0603 - of the process, as Triton's driver is
    _compiled_for = GPUTarget("cuda", arch, 32)
    driver.set_active(_StandIn(_compiled_for))
    try:
        yield
    finally:
        _compiled_for = None
        driver._active = None  # noqa: SLF001 - else the next to ask would look for a card


class _StandIn:
    """What Triton asks of a driver to compile, without a card."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # type: ignore[no-any-return]

    def get_current_stream(self, _device: int) -> int:
        return 0
