"""Launches kernels: runs them on tensors, or only compiles them, for a GPU that may be absent.

Both use the same functions, so that an image precompiles exactly the kernels of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from .tuned_tiles import KernelConfig

# Dtypes of the activations that kernels take.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The target while kernels are only compiled, not run.
_compiled_for: GPUTarget | None = None


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, config: KernelConfig, **constants: Any
) -> Any:
    """Run a kernel over a grid of programs; an empty grid launches nothing.

    Within `compile_only` it is compiled instead, and the compiled kernel returned.
    """
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if _compiled_for is not None:
        return kernel.warmup(*args, grid=grid, **config.sizes, **constants, **options)
    if all(grid):
        kernel[grid](*args, **config.sizes, **constants, **options)
    return None


def cdiv(dividend: int, divisor: int) -> int:
    """Return a quotient, rounded up; Triton's own takes 3 µs."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least a positive number."""
    return 1 << (number - 1).bit_length()


def arch_of(device: torch.device) -> str:
    """Return the architecture that kernels are compiled for, as "sm_90", or "interpreter"."""
    if _compiled_for is not None:
        return f"sm_{_compiled_for.arch}"
    return "interpreter" if device.type == "cpu" else _arch_of(device.index)


@cache
def _arch_of(index: int | None) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@contextmanager
def compile_only(arch: int) -> Iterator[None]:
    """Compile kernels for an architecture such as 90 instead of running them, on any tensors.

    Kernels in Triton's cache are not compiled again.
    """
    global _compiled_for  # noqa: PLW0603 - global like Triton's driver
    _compiled_for = GPUTarget("cuda", arch, 32)
    driver.set_active(_StubDriver(_compiled_for))
    try:
        yield
    finally:
        _compiled_for = None
        driver._active = None  # noqa: SLF001 - otherwise the next use would look for a card


class _StubDriver:
    """Stub of Triton's driver: the functions that compiling needs, without a GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # type: ignore[no-any-return]

    def get_current_stream(self, _device: int) -> int:
        return 0
