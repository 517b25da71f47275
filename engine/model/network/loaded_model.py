"""A loaded model: its network, native or transformers', and its attention backend and sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention import AttentionBackend, AttentionBackendType, AttentionShape
from ...kernels.backends import choose_backend, choose_recurrence
from ...kernels.grouped import make_grouped
from ...kernels.hybrid import make_hybrid
from ...kernels.layer_groups import LayerGroup, group_layers
from ...kernels.recurrence import RecurrentShape
from ...kernels.step import Step
from ...scheduling.images import ImageSpec


class Network(Protocol):
    """A decoder with its weights; `num_layers_started` counts since the start, within steps too.

    `needs_torch` where much of a step is computed by torch's own functions, on its threads.
    """

    num_layers_started: int
    needs_torch: bool

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step, each layer's attention by `attention` → logits `[N, V]` of its rows.

        `attention` was prepared for the step; layers are numbered in the order of the network.
        """


@runtime_checkable
class NetworkWithHead(Network, Protocol):
    """A network that can stop before its head: what comes before may be a graph's."""

    def hidden_states(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step but for the head → the last hidden states `[N, H]` of its rows."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of the last hidden states `[N, H]`."""


class VisionTower(Protocol):
    """Vision encoder's network: turns an image into embeddings that replace those of tokens."""

    def encode(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return an image's vectors: `[H, W, 3]` → `[tokens, (1 + D) · H]`, of the network's dtype.

        For D see `Step.shown`. They depend on nothing else.
        """


class VisionEncoder(NamedTuple):
    """A model's image preprocessing and its vision tower."""

    image_spec: ImageSpec
    tower: VisionTower


class GraphLimits(NamedTuple):
    """Limits of CUDA graphs, and the device's last ids `[slots]`, used where the host has none.

    `drop` destroys the graphs, from any thread.
    """

    most_tokens: int
    most_pages: int
    last_ids: Tensor
    drop: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network on its device, and what the engine must know to serve it.

    `shapes[i]` is what attention layer i attends with, `backend` what makes the attention of all of
    them, `cache_dtype` what keys and values are kept in, None as the network computes them;
    `recurrent_shapes[i]` is what recurrent layer i keeps.
    `max_intermediate_size` is that of the widest layer. Sequences that may come to more tokens than
    `original_positions` take its ropes' long frequencies. `eos_token_ids` is as the model's config
    has it: an id, a list of ids, or None. Without a `vision_encoder` it takes no images.
    `notes` are for who runs it. `check` raises what has made worthless all that was computed since;
    None where nothing can.
    """

    network: Network
    shapes: tuple[AttentionShape, ...]
    backend: AttentionBackendType
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int
    hidden_size: int
    max_intermediate_size: int
    recurrent_shapes: tuple[RecurrentShape, ...] = ()
    original_positions: int | None = None
    eos_token_ids: object = None
    vision_encoder: VisionEncoder | None = None
    notes: tuple[str, ...] = ()
    cache_dtype: torch.dtype | None = None
    check: Callable[[], None] | None = None

    def with_kv_cache_dtype(self, dtype: torch.dtype | None) -> Self:
        """Return the model with keys and values in a dtype of their own; None is the network's.

        Proofs are made with the network's.
        """
        if dtype == self.cache_dtype:
            return self
        backend = choose_backend(self.shapes, dtype or self.dtype, self.device)
        return replace(self, backend=backend, cache_dtype=dtype)

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the groups of attention layers, each with page lists of its own."""
        return group_layers(self.shapes, self.max_model_len)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page, which serves any group."""
        largest = max((group.layers for group in self.layer_groups), key=len)
        shapes = [self.shapes[layer] for layer in largest]
        return self.backend.page_bytes(shapes, self.cache_dtype or self.dtype)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a sequence's recurrent state."""
        if not self.recurrent_shapes:
            return 0
        recurrence = choose_recurrence(self.recurrent_shapes, self.dtype, self.device)
        return recurrence.row_bytes(self.recurrent_shapes, self.dtype)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of keys and values of one token that all layers see."""
        dtype = self.cache_dtype or self.dtype
        return self.backend.page_bytes(self.shapes, dtype) // self.backend.page_size

    @property
    def has_head(self) -> bool:
        """Say whether logits may be computed apart from the layers, a tile at a time."""
        return isinstance(self.network, NetworkWithHead)

    def run_graph(
        self,
        step: Step,
        attention: AttentionBackend,
        graphs: GraphLimits,
        call: Callable[[], Tensor],
    ) -> Tensor:
        """Call what computes a step in graphs; whoever shares the model hears of it first."""
        del step, attention, graphs
        return call()

    def attention(
        self, num_pages: int, num_rows: int = 0, groups: Sequence[LayerGroup] = ()
    ) -> AttentionBackend:
        """Allocate so many pages and rows; without `groups` all layers have the same page lists."""
        dtype = self.cache_dtype or self.dtype
        if len(groups) > 1:
            parts = (self.shapes, groups, num_pages, dtype, self.device)
            attention: AttentionBackend = make_grouped(self.backend, *parts)
        else:
            attention = self.backend(self.shapes, num_pages, dtype, self.device)
        if not self.recurrent_shapes:
            return attention
        recurrence = choose_recurrence(self.recurrent_shapes, self.dtype, self.device)
        own = recurrence(self.recurrent_shapes, num_rows, self.dtype, self.device)
        return make_hybrid(attention, own)
