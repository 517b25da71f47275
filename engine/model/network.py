"""What runs a step, a decoder of our own or of transformers, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.attention import AttentionBackend, AttentionShape, MakesBackend
from engine.kernels.step import Step


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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network on its device, and what the engine must know to serve it.

    `shapes[i]` is what layer i attends with, `backend` what makes the attention of all of them.
    `hidden_width` and `inner_width` are those of the widest layer. `eos_token_ids` is as the
    model's config has it: an id, a list of ids, or None. `notes` are for who runs it.
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
    notes: tuple[str, ...] = ()

    def attention(self, num_pages: int) -> AttentionBackend:
        """Allocate so many pages of every layer."""
        return self.backend(self.shapes, num_pages, self.dtype, self.device)
