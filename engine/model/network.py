"""What runs a step, a decoder of our own or of transformers, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention import AttentionBackend, AttentionShape, MakesBackend
from engine.kernels.backends import choose_backend
from engine.kernels.step import Step
from engine.scheduling.pictures import Sight


class Network(Protocol):
    """A decoder with its weights; `num_layers_begun` counts since the start, within steps too.

    `needs_torch` where much of a step is computed by torch's own functions, on its threads.
    """

    num_layers_begun: int
    needs_torch: bool

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step, each layer's attention by `attention` → logits `[N, V]` of its rows.

        `attention` was prepared for the step; layers are numbered in the order of the network.
        """


@runtime_checkable
class NetworkInTwo(Network, Protocol):
    """A network that can stop before its head: what comes before may be a graph's."""

    def hidden(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step but for the head → the last hidden states `[N, H]` of its rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of the last hidden states `[N, H]`."""


class Tower(Protocol):
    """What turns images into vectors that a network takes in place of those of tokens."""

    def look(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return an image's vectors: `[H, W, 3]` → `[tokens, H]`, of the network's dtype.

        They depend on nothing else.
        """


class Eye(NamedTuple):
    """How a model sees, and by what."""

    sight: Sight
    tower: Tower


class InGraphs(NamedTuple):
    """What graphs hold at most, and the ids `[slots]` that they take where the host knows none."""

    most_tokens: int
    most_pages: int
    last_ids: Tensor


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network on its device, and what the engine must know to serve it.

    `shapes[i]` is what layer i attends with, `backend` what makes the attention of all of them,
    `cache_dtype` what keys and values are kept in, None as the network computes them.
    `hidden_width` and `inner_width` are those of the widest layer. `eos_token_ids` is as the
    model's config has it: an id, a list of ids, or None. Without an `eye` it sees no images.
    `notes` are for who runs it.
    """

    network: Network
    shapes: tuple[AttentionShape, ...]
    backend: MakesBackend
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int
    hidden_width: int
    inner_width: int
    eos_token_ids: object = None
    eye: Eye | None = None
    notes: tuple[str, ...] = ()
    cache_dtype: torch.dtype | None = None

    def kept_in(self, dtype: torch.dtype | None) -> Self:
        """Return the model with keys and values in a dtype of their own; None is the network's.

        Proofs are made with the network's.
        """
        if dtype == self.cache_dtype:
            return self
        backend = choose_backend(self.shapes, dtype or self.dtype, self.device)
        return replace(self, backend=backend, cache_dtype=dtype)

    @property
    def page_bytes(self) -> int:
        """Return the bytes that one page takes over all layers."""
        return self.backend.page_bytes(self.shapes, self.cache_dtype or self.dtype)

    def graphed(
        self, step: Step, attention: AttentionBackend, graphs: InGraphs, call: Callable[[], Tensor]
    ) -> Tensor:
        """Call what computes a step in graphs; whoever shares the model hears of it first."""
        del step, attention, graphs
        return call()

    def check(self) -> None:
        """Raise what has made worthless all that was computed since; here nothing can."""

    def attention(self, num_pages: int) -> AttentionBackend:
        """Allocate so many pages of every layer."""
        return self.backend(self.shapes, num_pages, self.cache_dtype or self.dtype, self.device)
