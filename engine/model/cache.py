"""The KV cache: keys and values of every layer, in pages, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape


class KVCache:
    """Keys and values of every layer, in pages; zero until written.

    `keys[layer] [pages, Hkv, Dk, page_size]`, `values[layer] [pages, Hkv, page_size, Dv]`.
    """

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            pages_heads = (num_pages, shape.num_kv_heads)
            self.keys.append(_zeros((*pages_heads, shape.key_dim, page_size), dtype, device))
            self.values.append(_zeros((*pages_heads, page_size, shape.value_dim), dtype, device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros that take no memory on a CPU until written.

    Zeros, not garbage: kernels weight unwritten slots by zero, which a NaN would survive.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages where torch.zeros would write them all.
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)


def page_bytes(shapes: Sequence[AttentionShape], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one page takes over all layers."""
    widths = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return widths * page_size * dtype.itemsize
