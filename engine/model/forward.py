"""A model's forward pass: how its network is called, and the one attention that its layers call.

transformers hands that function rotated queries and keys of all packed tokens; which layer, which
pages and which kernel is ours to say: `PagedAttention` finds a call's layer in the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.kernels import reference
from engine.kernels.attention import AttentionShape
from engine.kernels.packed import PackedStep
from engine.model.cache import KVCache

# What transformers knows our attention function by.
ATTENTION = "tidemill"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that proved itself: `network` maps packed tokens to logits.

    `layers[i]` is the attention module that `shapes[i]` describes.
    """

    network: nn.Module
    layers: tuple[nn.Module, ...]
    shapes: tuple[AttentionShape, ...]
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        paged: PagedAttention | RecordingAttention,
    ) -> Tensor:
        """Run one step: `token_ids [T]`, `positions [T]`, `logit_rows [N]` → logits `[N, V]`."""
        return forward(self.network, token_ids, positions, logit_rows, paged)


def forward(
    network: nn.Module,
    token_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    paged: PagedAttention | RecordingAttention,
) -> Tensor:
    """Run one step through a network; see `LoadedModel.forward`."""
    output = network(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logit_rows,
        paged=paged,
    )
    logits: Tensor = output.logits[0]
    return logits


class PagedAttention:
    """Attention of one model's layers over one cache; passed to the model's forward as `paged`."""

    def __init__(
        self, modules: Sequence[nn.Module], shapes: Sequence[AttentionShape], cache: KVCache
    ) -> None:
        self._layer_of = {id(module): layer for layer, module in enumerate(modules)}
        self._shapes = shapes
        self._cache = cache
        self._step: PackedStep | None = None
        self.num_calls = 0

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
        self.num_calls += 1
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


AttentionInterface.register(ATTENTION, _dispatch)
