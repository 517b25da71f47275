"""The dtypes of products of the CPU, each skipped if the processor has no kernel for it."""

from __future__ import annotations

import pytest
import torch

from tidemill.engine.kernels.cpu import linear

DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not linear.supports(dtype), reason=f"no kernel for {dtype} on this processor"
        ),
        id=str(dtype),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
