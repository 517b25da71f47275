"""Launches kernels: runs them on tensors, or only compiles them, for a GPU that may be absent.

Both use the same functions, so that an image precompiles exactly the kernels of a run. Triton's
call binds arguments, builds a key and checks globals; a compiled kernel is called directly instead,
in Triton's versions that are known to allow it, by a function that is generated for the kinds of
its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

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
DIRECT_VERSIONS = ("3.7.", "3.8.", "3.9.")
# Compiled kernels that are kept: models use some hundreds.
MOST_COMPILED = 8192
INT32, INT64 = 1 << 31, 1 << 63


# Launchers of compiled kernels by kernel, device, config and constants.
_kept: dict[tuple[Any, ...], list[Callable[..., bool]]] = {}
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
    if 0 in grid:
        return None
    if not can_call_directly():
        kernel[grid](*args, **constants, **_options(config))
        return None
    active = driver.active
    device = active.get_current_device()
    stream = active.get_current_stream(device)
    # Not the config's `id`: some callers make a new one for each launch.
    sizes = config.sizes
    key = (
        *(id(kernel), device, config.num_warps, config.num_stages),
        *(*sizes, *sizes.values(), *constants, *constants.values()),
    )
    for launcher in _kept.get(key, ()):
        if launcher(grid, stream, *args):
            return None
    returned = kernel[grid](*args, **constants, **_options(config))
    new = _launcher_of(kernel, returned, grid, args, {**sizes, **constants})
    if new is not None:
        _keep(key, new)
    return None


def launches_none(num_programs: int) -> bool:
    """Return whether a launch of this number of programs does nothing, not even compile."""
    return not num_programs and _compiled_for is None


@cache
def can_call_directly() -> bool:
    """Return whether this version of Triton has the known launcher."""
    return triton.__version__.startswith(DIRECT_VERSIONS) and not knobs.runtime.interpret


def _options(config: KernelConfig) -> dict[str, Any]:
    """Return a config's constants, and Triton's options.

    Triton 3.9 warns that a later version no longer fuses products and sums by default.
    """
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return {**config.sizes, **options, "enable_fp_fusion": True}


def _launcher_of(
    kernel: Any,
    returned: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
) -> Callable[..., bool] | None:
    """Return a launcher of a kernel that Triton has compiled for such arguments.

    It takes a grid, a stream and arguments; it returns False, without a launch, for arguments of
    another kind. None if the compiled kernel cannot be called directly, as one that has constants
    among these arguments, which conditions do not compare.
    """
    names: Any = kernel.arg_names[len(args) :] if isinstance(kernel, JITFunction) else [None]
    parts = [getattr(returned, name, None) for name in ("run", "function", "packed_metadata")]
    conditions = [_condition(f"a{place}", arg) for place, arg in enumerate(args)]
    if None in parts or None in conditions or constants.keys() != set(names):
        return None
    if any(place < len(args) for place in kernel.constexprs):
        return None
    given = "".join(f", a{place}" for place in range(len(args)))
    values = [f"{'p' * isinstance(arg, Tensor)}a{place}" for place, arg in enumerate(args)]
    sizes = [f"grid[{place}]" if place < len(grid) else "1" for place in range(3)]
    passed = [*sizes, "stream", "function", "metadata", *["None"] * 3, *values, "*constants"]
    source = (
        f"def launcher(grid, stream{given}):\n"
        f"    if {' and '.join([f'len(grid) == {len(grid)}', *map(str, conditions)])}:\n"
        f"        run({', '.join(passed)})\n"
        "        return True\n"
        "    return False\n"
    )
    scope = dict(zip(("run", "function", "metadata"), parts, strict=True))
    scope |= {"constants": tuple(constants[name] for name in names), "Tensor": Tensor}
    # Triton 3.8 and later unload a compiled kernel that nothing refers to.
    scope |= {"Parameter": Parameter, "kernel": returned}
    scope |= {_name_of(arg.dtype): arg.dtype for arg in args if isinstance(arg, Tensor)}
    exec(source, scope)  # noqa: S102 - of types and numbers alone: a loop takes three times as long
    return scope["launcher"]


def _condition(name: str, arg: Any) -> str | None:
    """Return source that is true for arguments which Triton compiles the same kernel for.

    It compiles for dtypes, multiples of 16, the number 1, and the width of a number. The condition
    also assigns the pointer of a tensor. None for an argument of another type, or a pointer that is
    not aligned to 16.
    """
    kind = type(arg)
    if arg is None:
        return f"{name} is None"
    if kind is Tensor or kind is Parameter:
        if arg.data_ptr() & 15:
            return None
        types = f"type({name}) is {kind.__name__} and {name}.dtype is {_name_of(arg.dtype)}"
        return f"{types} and not (p{name} := {name}.data_ptr()) & 15"
    if kind is float or kind is bool:
        return f"type({name}) is {kind.__name__}"
    if kind is not int:
        return None
    is_one = f"{name} == 1" if arg == 1 else f"{name} != 1"
    multiple = f"{name} & 15" if arg & 15 else f"not {name} & 15"
    is_narrow = -INT32 <= arg < INT32
    width = f"{'' if is_narrow else 'not '}{-INT32} <= {name} < {INT32}"
    if not is_narrow:
        width += f" and {name} {'<' if arg < INT64 else '>='} {INT64}"
    return f"type({name}) is int and {is_one} and {multiple} and {width}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).replace(".", "_")  # not `bool`, which is also the type of an argument


def _keep(key: tuple[Any, ...], launcher: Callable[..., bool]) -> None:
    """Keep a launcher, within the limit on their number."""
    if sum(map(len, _kept.values())) >= MOST_COMPILED:
        _kept.clear()
    _kept.setdefault(key, []).append(launcher)


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
    return _arch_of(device)


@cache
def _arch_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
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
