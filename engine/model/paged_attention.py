"""The one attention function that transformers' models call, over our paged KV cache.

transformers hands it rotated queries and keys of all packed tokens; which layer, which pages and
which kernel is ours to say. `KVCache` holds the tensors, `PagedAttention` finds a call's layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.kernels import reference
from engine.kernels.reference import AttentionShape, PackedStep

NAME = "tidemill"


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


class PagedAttention:
    """Attention of one model's layers over one cache; passed to the model's forward as `paged`."""

    def __init__(
        self, modules: Sequence[nn.Module], shapes: Sequence[AttentionShape], cache: KVCache
    ) -> None:
        self._layer_of = {id(module): layer for layer, module in enumerate(modules)}
        self._shapes = shapes
        self._cache = cache
        self._step: PackedStep | None = None

    def over(self, step: PackedStep) -> PagedAttention:
        """Set the step that the coming forward pass runs, and return self."""
        self._step = step
        return self

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Store the step's keys and values and attend: `[1, H, T, D]` each → `[1, T, Hq, Dv]`."""
        step = self._step
        assert step is not None, "over() names the step before the model runs"
        layer = self._layer_of[id(module)]
        shape = self._shapes[layer]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        kernels = _kernels(keys, shape)
        kernels.store(keys, values, key, value, step)
        parts = []
        if step.num_decodes:
            decodes = query[: step.num_decodes]
            parts.append(kernels.decode(decodes, keys, values, step, shape, sinks))
        parts.extend(
            reference.prefill(query[chunk.start : chunk.stop], keys, values, chunk, shape, sinks)
            for chunk in step.chunks
        )
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


class RecordingAttention:
    """Plain causal attention that notes each call's module and shape: the one-token probe's."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.shapes: list[AttentionShape] = []

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Note one call and answer it: `[1, H, T, D]` each → `[1, T, Hq, Dv]`."""
        sinks = options.get("s_aux")
        shape = AttentionShape(
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scaling=float(options.get("scaling") or query.shape[3] ** -0.5),
            window=int(options.get("sliding_window") or 0),
            softcap=float(options.get("softcap") or 0.0),
            has_sinks=sinks is not None,
        )
        self.modules.append(module)
        self.shapes.append(shape)
        return reference.attend(query[0].transpose(0, 1), key[0], value[0], shape, sinks)[None]


def _kernels(keys: Tensor, shape: AttentionShape) -> Any:
    """Return the module whose `store` and `decode` serve this cache."""
    if keys.device.type == "cpu":
        from engine.kernels import cpu

        if cpu.supports_attention(keys.dtype, shape, keys.shape[3]):
            return cpu
    return reference


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' signature
    *,
    paged: PagedAttention | RecordingAttention,
    **options: Any,
) -> tuple[Tensor, None]:
    if isinstance(paged, RecordingAttention):
        return paged.record(module, query, key, value, options), None
    return paged(module, query, key, value, options.get("s_aux")), None


AttentionInterface.register(NAME, _dispatch)
