"""A loaded model: its network, native or transformers', and its attention backend and sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

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
from ...scheduling.prompt_audio import AudioSpec

T = TypeVar("T")


class Network(Protocol):
    """A decoder with its weights; `num_layers_started` counts since the start, within steps too.

    `needs_torch` is set if torch's own functions, on its threads, compute much of a step.
    """

    num_layers_started: int
    needs_torch: bool

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step, each layer's attention by `attention` → logits `[N, V]` of its rows.

        `attention` was prepared for the step; layers are numbered in the order of the network.
        """


@runtime_checkable
class NetworkWithHead(Network, Protocol):
    """A network that can stop before its head: the part before it may be a CUDA graph."""

    has_exact_logits: bool

    def forward_whole(self, step: Step, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Run one step → the last hidden states `[N, H]` and logits `[N, V]` of its rows."""

    def hidden_states(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step except for the head → the last hidden states `[N, H]` of its rows."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of the last hidden states `[N, H]`."""

    def compute_exact_logits(
        self, hidden: Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> Tensor:
        """Return the logit `[M]` of one token after each of some rows of the step, in fp32.

        `hidden [N, H]` are those of the last step. It requires `has_exact_logits`.
        """


class VisionTower(Protocol):
    """Vision encoder's network: computes image embeddings that replace those of tokens."""

    def encode(self, pixels: NDArray[Any]) -> Tensor:
        """Return an image's vectors: `[H, W, 3]` → `[tokens, (1 + D) · H]`, of the network's dtype.

        D is described in `Step.shown`. They depend on nothing else.
        """


class VisionEncoder(NamedTuple):
    """A model's image preprocessing and its vision tower, or those of recordings."""

    image_spec: ImageSpec | AudioSpec
    tower: VisionTower


class GraphLimits(NamedTuple):
    """Limits of CUDA graphs, and the device's last ids `[slots]`, for ids that the host lacks.

    `drop` destroys the graphs, from any thread.
    """

    most_tokens: int
    most_pages: int
    last_ids: Tensor
    drop: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network on its device, and the values that the engine needs to serve it.

    `shapes[i]` is the spec of attention layer i, `backend` makes the attention of all of them,
    `cache_dtype` is the dtype of keys and values, None for the network's; `recurrent_shapes[i]` is
    the state of recurrent layer i.
    `max_intermediate_size` is that of the widest layer. Sequences that may grow beyond
    `original_positions` use its ropes' long frequencies. `eos_token_ids` is as in the model's
    config: an id, a list of ids, or None. Without a `vision_encoder` it does not take images.
    `notes` are for the user. `check` raises if an error has invalidated all computations since;
    None if there cannot be one.
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
        """Return the model with a separate dtype for keys and values; None is the network's.

        Parity checks use the network's.
        """
        if dtype == self.cache_dtype:
            return self
        backend = choose_backend(self.shapes, dtype or self.dtype, self.device)
        return replace(self, backend=backend, cache_dtype=dtype)

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the groups of attention layers, each with separate page lists."""
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
        """Return whether logits may be computed apart from the layers, a tile at a time."""
        return isinstance(self.network, NetworkWithHead)

    def run_graph(
        self,
        step: Step,
        attention: AttentionBackend,
        graphs: GraphLimits,
        call: Callable[[], T],
    ) -> T:
        """Call a step that runs in CUDA graphs; other ranks are notified first."""
        del step, attention, graphs
        return call()

    def attention(
        self, num_pages: int, num_rows: int = 0, groups: Sequence[LayerGroup] = ()
    ) -> AttentionBackend:
        """Allocate pages and rows; without `groups` all layers have the same page lists."""
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
