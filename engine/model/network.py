"""What runs a step: a decoder on its device, of our own or of transformers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.kernels.attention import AttentionBackend
from engine.kernels.step import Step


class Network(Protocol):
    """A decoder with its weights; `num_layers_begun` counts since the start, within steps too."""

    num_layers_begun: int

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Run one step, each layer's attention by `attention` → logits `[N, V]` of its rows.

        `attention` was prepared for the step; layers are numbered in the order of the network.
        """
