"""The dtypes of products of the CPU, each skipped where the processor has no kernel for it."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cpu import products

DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not products.serves(dtype), reason=f"no kernel for {dtype} on this processor"
        ),
        id=str(dtype),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
