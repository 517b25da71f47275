"""Launches kernels: runs them on tensors, or only compiles them, for a GPU that may be absent.

Both use the same functions, so that an image precompiles exactly the kernels of a run. Triton's
call binds arguments, builds a key and checks globals; a compiled kernel whose arguments are of
known kinds is called directly instead, in Triton's versions that are known to allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .tuned_tiles import KernelConfig

# Dtypes of the activations that kernels take.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Versions of Triton whose compiled kernels can be called directly.
DIRECT_VERSIONS = ("3.7.",)
# Compiled kernels that are kept: models use some hundreds.
MOST_COMPILED = 8192
INT32, INT64 = 1 << 31, 1 << 63


class _Compiled(NamedTuple):
    """A compiled kernel: its launcher, with its first and last arguments."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    config: KernelConfig  # keeps the `id` in the key


# By kernel, config, constants, device, and kinds of arguments.
_compiled: dict[Any, _Compiled] = {}
# The target while kernels are only compiled, not run.
_compiled_for: GPUTarget | None = None


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, config: KernelConfig, **constants: Any
) -> Any:
    """Run a kernel over a grid of programs; an empty grid launches nothing.

    Within `compile_only` it is compiled instead, and the compiled kernel returned.
    """
    if _compiled_for is not None:
        return kernel.warmup(*args, grid=grid, **constants, **_options(config))
    if not all(grid):
        return None
    described = _described(args) if can_call_directly() else None
    if described is None:
        kernel[grid](*args, **constants, **_options(config))
        return None
    kinds, values = described
    device = driver.active.get_current_device()
    key = id(kernel), id(config), *constants, *constants.values(), device, *kinds
    compiled = _compiled.get(key)
    if compiled is None:
        returned = kernel[grid](*args, **constants, **_options(config))
        _keep(key, kernel, returned, len(args), config, constants)
        return None
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    compiled.run(
        *(x, y, z, stream, compiled.function, compiled.metadata, None, None, None),
        *(*values, *compiled.constants),
    )
    return None


@cache
def can_call_directly() -> bool:
    """Return whether this version of Triton has the known launcher."""
    return triton.__version__.startswith(DIRECT_VERSIONS) and not knobs.runtime.interpret


def _options(config: KernelConfig) -> dict[str, Any]:
    """Return a config's constants, and Triton's options."""
    return {**config.sizes, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _described(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """Return what Triton compiles arguments for, and the arguments with pointers as numbers.

    It compiles for dtypes, multiples of 16, the number 1, and the width of a number. None if there
    are arguments of another type, or pointers that are not aligned to 16.
    """
    kinds: list[Any] = []
    values = list(args)
    pointers = 0
    for place, arg in enumerate(args):
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            values[place] = pointer = arg.data_ptr()
            pointers |= pointer
            kinds.append(arg.dtype)
        elif kind is int:
            if -INT32 <= arg < INT32:
                kinds.append(1 if arg == 1 else 2 if arg & 15 == 0 else 3)
            else:
                kinds.append((arg & 15 == 0, arg < INT64))
        elif arg is None or kind is float or kind is bool:
            kinds.append(kind)
        else:
            return None
    return None if pointers & 15 else (kinds, values)


def _keep(
    key: Any,
    kernel: Any,
    returned: Any,
    num_args: int,
    config: KernelConfig,
    constants: dict[str, Any],
) -> None:
    """Keep a kernel that Triton has compiled and launched, if it can be called directly."""
    later = {**config.sizes, **constants}
    names: Any = kernel.arg_names[num_args:] if isinstance(kernel, JITFunction) else [None]
    parts = [getattr(returned, name, None) for name in ("run", "function", "packed_metadata")]
    if None in parts or later.keys() != set(names):
        return
    if len(_compiled) >= MOST_COMPILED:
        _compiled.clear()
    run, function, metadata = parts
    in_order = tuple(later[name] for name in names)
    _compiled[key] = _Compiled(run, function, metadata, in_order, config)


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
