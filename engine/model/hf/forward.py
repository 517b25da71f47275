"""A network of transformers: its call, and the attention function that its layers call.

transformers passes rotated queries and keys of all packed tokens to that function. The `attend`
argument distinguishes a layer's call in a step from the one-token probe's, which determines each
layer's attention, and its mask the window, without reading configs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...errors import TransformersRefused, first_line_of
from ...kernels import reference
from ...kernels.attention import AttentionBackend, AttentionShape
from ...kernels.step import Step
from ..config.masks import windows_by_masks

# The name of our attention function in transformers.
ATTENTION = "tidemill"

# Module, query, key, value `[1, H, T, D]` each, and other arguments → `[1, T, Hq, Dv]`.
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]


class TransformersNetwork:
    """A `Network` over a module of transformers; `layers` are its attention modules in order."""

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.module = module
        self.num_layers_started = 0
        self.needs_torch = True
        self._layer_of = {id(layer): index for index, layer in enumerate(layers)}

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step → logits `[N, V]`; see `Network.forward`."""

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
        ) -> Tensor:
            self.num_layers_started += 1
            layer = self._layer_of[id(module)]
            query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            attention.store(layer, key, value)
            return attention.attend(layer, query, options.get("s_aux"))[None]

        return forward(self.module, step.token_ids, step.positions, step.logit_rows, attend)


def forward(
    module: nn.Module, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, attend: Attend
) -> Tensor:
    """Run packed tokens: `token_ids [T]`, `positions [T]`, `logit_rows [N]` → logits `[N, V]`."""
    output = module(
        input_ids=token_ids.long()[None],
        position_ids=positions.long()[None],
        use_cache=False,
        logits_to_keep=logit_rows.long(),
        attend=attend,
    )
    logits: Tensor = output.logits[0]
    return logits


def probe(
    name: str, module: nn.Module, device: torch.device
) -> tuple[tuple[nn.Module, ...], tuple[AttentionShape, ...]]:
    """Run one token and return each layer's attention module and shape, in order."""
    recording = RecordingAttention()
    one = torch.zeros(1, dtype=torch.long, device=device)
    try:
        forward(module, one, one, one, recording)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise TransformersRefused(
            f"{name}: {type(module).__name__} does not pass the arguments of the attention "
            f"interface: {first_line_of(exc)}"
        ) from exc
    config: Any = module.config
    expected = config.num_hidden_layers
    if len(recording.modules) != expected or len(set(map(id, recording.modules))) != expected:
        raise TransformersRefused(
            f"{name}: {type(module).__name__} has {expected} layers but made "
            f"{len(recording.modules)} attention calls per token. Every layer must be one "
            "attention layer: any other state would be silently wrong."
        )
    windows = windows_by_masks(module, device)
    shapes = []
    for index, (layer, shape) in enumerate(zip(recording.modules, recording.shapes, strict=True)):
        window = windows.get(id(layer))
        if window is None:
            _refuse_unseen_window(name, config, index, shape)
        shapes.append(shape if window is None else replace(shape, window=window))
    return tuple(recording.modules), tuple(shapes)


def _refuse_unseen_window(name: str, config: Any, layer: int, shape: AttentionShape) -> None:
    """Refuse a layer whose config has a window that neither call nor mask contains."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    slides = layer >= len(kinds) or kinds[layer] == "sliding_attention"
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if shape.window == 0 and slides and isinstance(window, int) and 0 < window < positions:
        raise TransformersRefused(
            f"{name}: its config.json sets sliding_window {window}, but it is unknown how its "
            "class applies it: beyond the window its answers would be wrong."
        )


class RecordingAttention:
    """Plain causal attention that records each call's module and shape: the one-token probe's."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.shapes: list[AttentionShape] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Record one call and answer it: `[1, H, T, D]` each → `[1, T, Hq, Dv]`."""
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


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' signature
    *,
    attend: Attend,
    **options: Any,
) -> tuple[Tensor, None]:
    return attend(module, query, key, value, options), None


AttentionInterface.register(ATTENTION, _dispatch)
