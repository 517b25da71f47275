"""A loaded encoder: its network over packed tokens, its pooler and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention import AttentionBackend, AttentionBackendType, AttentionShape
from ...kernels.backends import choose_recurrence
from ...kernels.hybrid import make_hybrid
from ...kernels.recurrence import RecurrentBackend, RecurrentShape, RuleWeights
from ...kernels.step import Step
from ...scheduling.encoding import EncodingOutput, SchemaSpans
from .image_encoder import ImageTower
from .pooler import Pooler
from .shared_pages import SharedPages
from .two_towers import TextForm


class EncoderNetwork(Protocol):
    """A network with its weights; `num_layers_started` counts since the start, within steps too.

    `needs_torch` is set if torch's own functions, on its threads, compute much of a step.
    """

    needs_torch: bool
    num_layers_started: int

    def can_replay(self, token_ids: NDArray[np.int32]) -> bool:
        """Return whether a graph that was captured for other tokens can encode these."""

    def encode(self, step: Step, type_ids: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Run whole sequences → the last hidden states `[N, H]` of the step's `logit_rows`.

        `type_ids [T]` are the segments of tokens, None if all are the first. `attention` was
        prepared for the step; layers are numbered in the order of the network.
        """


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A network on its device, its head, and the sizes that the engine needs to serve them.

    `shapes[i]` is the attention of layer i, `recurrent_shapes[i]` the state of recurrent layer i.
    `hidden_size` is the width of a hidden state, `max_intermediate_size` that of the widest MLP (0
    if unknown), `width` that of a sequence's output. The model
    distinguishes segments if `num_types` is above 1. `lexicon [V, H]` are the output embeddings, if
    its head reads them. `token_poolers` give the outputs of tokens, if the model has its own heads
    for them. A `decision_network` takes the place of the pooler. Images of a model of two towers
    have an `image_tower`, and texts a `text_form`. `notes` are for the user.
    """

    network: EncoderNetwork
    pooler: Pooler
    shapes: tuple[AttentionShape, ...]
    backend: AttentionBackendType
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_types: int
    max_model_len: int
    hidden_size: int
    notes: tuple[str, ...] = ()
    recurrent_shapes: tuple[RecurrentShape, ...] = ()
    max_intermediate_size: int = 0
    lexicon: Tensor | None = None
    token_poolers: Mapping[EncodingOutput, Pooler] = field(default_factory=dict)
    decision_network: Callable[[Tensor, Tensor, SchemaSpans], Tensor] | None = None
    image_tower: ImageTower | None = None
    text_form: TextForm | None = None

    @property
    def width(self) -> int:
        """Return the width of a sequence's output."""
        return self.pooler.width(self.hidden_size, self.device)

    def giving(self, output: EncodingOutput) -> LoadedEncoder:
        """Return the model with another output: that of each token."""
        return replace(self, pooler=self.token_poolers.get(output) or self.pooler.of_tokens)

    def attention(self, num_pages: int, num_sequences: int) -> AttentionBackend:
        """Allocate `num_pages` pages and a row of recurrent state for each sequence of a step.

        All layers of one shape use them in turn.
        """
        kinds = tuple(dict.fromkeys(self.shapes))
        backend = self.backend(kinds, num_pages, self.dtype, self.device)
        attention = SharedPages(backend, [kinds.index(shape) for shape in self.shapes])
        if not self.recurrent_shapes:
            return attention
        rules = tuple(dict.fromkeys(self.recurrent_shapes))
        make = choose_recurrence(rules, self.dtype, self.device)
        recurrence = make(rules, num_sequences, self.dtype, self.device)
        places = [rules.index(shape) for shape in self.recurrent_shapes]
        return make_hybrid(attention, _SharedRecurrence(recurrence, places))


class _SharedRecurrence:
    """A recurrent backend whose spans start from zeros: layers of one shape share the rows."""

    def __init__(self, backend: RecurrentBackend, places: Sequence[int]) -> None:
        self._backend = backend
        self._places = places
        self.gate_and_norm = backend.gate_and_norm

    def prepare(self, step: Step) -> None:
        """See `RecurrentBackend.prepare`."""
        self._backend.prepare(step)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `RecurrentBackend.convolve`."""
        return self._backend.convolve(self._places[layer], x, weight, bias)

    def apply_delta_rule(
        self, layer: int, qkv: Tensor, a: Tensor, b: Tensor, weights: RuleWeights
    ) -> Tensor:
        """See `RecurrentBackend.apply_delta_rule`."""
        return self._backend.apply_delta_rule(self._places[layer], qkv, a, b, weights)

    def scan(self, layer: int, xbc: Tensor, dt: Tensor, weights: RuleWeights) -> Tensor:
        """See `RecurrentBackend.scan`."""
        return self._backend.scan(self._places[layer], xbc, dt, weights)
