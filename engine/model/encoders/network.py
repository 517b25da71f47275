"""What turns packed tokens into vectors, and a model that does so and is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.attention import (
    AttentionBackend,
    AttentionShape,
    HeadNorms,
    MakesBackend,
)
from engine.kernels.step import Step
from engine.model.encoders.heads import Head


class TokenNetwork(Protocol):
    """A network with its weights; `num_layers_begun` counts since the start, within steps too.

    `needs_torch` where much of a step is computed by torch's own functions, on its threads.
    """

    needs_torch: bool

    @property
    def num_layers_begun(self) -> int:
        """Return how many layers were begun since the start."""

    def encode(self, step: Step, type_ids: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Run whole sequences → the last hidden states `[N, H]` of the step's `logit_rows`.

        `type_ids [T]` are the segments of tokens, None where all are of the first. `attention` was
        prepared for the step; layers are numbered in the order of the network.
        """


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A network on its device, its head, and what the engine must know to serve them.

    `shapes[i]` is what layer i attends with. `hidden_size` is the width of a hidden state, `width`
    how many numbers come of a sequence. Segments are told apart where there are `num_types` above
    1. `notes` are for who runs it.
    """

    network: TokenNetwork
    head: Head
    shapes: tuple[AttentionShape, ...]
    backend: MakesBackend
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_types: int
    max_model_len: int
    hidden_size: int
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Return how many numbers come of a sequence."""
        return self.head.width(self.hidden_size, self.device)

    def attention(self, num_pages: int) -> AttentionBackend:
        """Allocate so many pages, on which all layers of one shape lie after each other."""
        kinds = tuple(dict.fromkeys(self.shapes))
        backend = self.backend(kinds, num_pages, self.dtype, self.device)
        return _Shared(backend, [kinds.index(shape) for shape in self.shapes])


class _Shared:
    """A backend whose layers have no past: those of one shape take the pages from each other."""

    def __init__(self, backend: AttentionBackend, places: Sequence[int]) -> None:
        self.page_size = backend.page_size
        self._backend = backend
        self._places = places

    def prepare(self, step: Step) -> None:
        """See `AttentionBackend.prepare`."""
        self._backend.prepare(step)

    def enter(self, layer: int, qkv: Tensor, turns: Tensor, norms: HeadNorms | None) -> Tensor:
        """See `AttentionBackend.enter`."""
        return self._backend.enter(self._places[layer], qkv, turns, norms)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend.store`."""
        self._backend.store(self._places[layer], key, value)

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        return self._backend.attend(self._places[layer], query, sinks)
