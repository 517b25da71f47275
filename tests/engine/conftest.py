"""Engine tests run tiny models: one thread each is faster than waking a second."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numba
import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    numba.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    """Keep Triton's interpreter from repeating work whose result is the same: most of its time."""
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter, core = map(import_module, ("triton.runtime.interpreter", "triton.language.core"))
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _looked_up_once(interpreter._get_np_dtype, core)
    # Overflows are looked for, but only asserted in the debug mode, which is off.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    core.tensor.__init__ = _init_of_tensors(core)
    interpreter.InterpreterBuilder.create_splat = _splat_of(interpreter.TensorHandle)


def _patched_once(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace Triton's language by functions that compute once in a launch.

    Each call within a kernel has the interpreter look through the whole language for more.
    """
    language = import_module("triton.language")

    def patch_once(fn: Any) -> Any:
        used = [it for it in fn.__globals__.values() if it is language or it is language.core]
        is_patched = not any(language.core.is_builtin(it.load) for it in used)
        return None if is_patched else patch_language(fn)

    return patch_once


def _looked_up_once(numpy_dtype: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    """Return a function that finds the dtype of each type of numbers once."""
    found = cache(numpy_dtype)

    def dtype_of(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, core.block_type) else kind
        return found(scalar) if type(scalar) is core.dtype else numpy_dtype(kind)

    return dtype_of


def _splat_of(handle: Any) -> Callable[[Any, Any, Any], Any]:
    """Return the builder's `create_splat`, by which a number's comparison stays a mask.

    Triton labels comparisons with their operands' type; from 3.9 loads refuse masks of that type.
    """

    def create_splat(_builder: Any, kind: Any, arg: Any) -> Any:
        return handle(np.full(kind.shape, arg.data, arg.data.dtype), arg.dtype.scalar)

    return create_splat


def _init_of_tensors(core: Any) -> Callable[[Any, Any, Any], None]:
    """Return `tensor.__init__`, with one object for each shape."""

    @cache
    def described(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = described(tuple(type.shape) if type.is_block() else ())

    return init
