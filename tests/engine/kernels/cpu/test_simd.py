"""SIMD building blocks compute the same without the processor's instructions."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tidemill.engine.kernels.cpu import simd


def test_bf16_is_rounded_as_torch_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties to even, up to infinity; a NaN whose upper bits are none stays one."""
    monkeypatch.setattr(simd, "HAS_PAIR_PRODUCT", False)
    bits = [0, 1 << 31, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    nans = [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF]
    some = np.random.default_rng(0).integers(0, 1 << 32, 21, dtype=np.uint32).tolist()
    numbers = np.array([*bits, *nans, *some], dtype=np.uint32).view(np.float32)
    rounded = np.zeros(32, dtype=np.uint16)
    _compiled()(numbers, rounded)
    expected = torch.from_numpy(numbers).bfloat16()
    torch.testing.assert_close(
        torch.from_numpy(rounded).view(torch.bfloat16), expected, rtol=0, atol=0, equal_nan=True
    )


def _compiled() -> Any:
    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def round_all(_typing: Any, numbers: Any, rounded: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = zip(signature.args, args, (simd.FLOAT, simd.HALVES.element), strict=True)
            source, target = (
                simd.pointer_to(context, builder, kind, array, element)
                for kind, array, element in kinds
            )
            for start in (0, simd.LANES):
                at = ir.Constant(simd.WORD, start)
                lanes = simd.load(builder, source, at, simd.FLOATS)
                simd.store(builder, simd.round_to_bf16(builder, lanes), target, at)
            return context.get_dummy_value()

        return types.void(numbers, rounded), generate

    @numba.njit  # type: ignore[untyped-decorator]
    def run(numbers: Any, rounded: Any) -> None:
        round_all(numbers, rounded)

    return run
