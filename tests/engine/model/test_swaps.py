"""Which modules give way to faster ones, and which stay."""

from __future__ import annotations

from typing import Any

import torch

from engine.model import swaps
from tests.engine.families import build


def test_swaps_take_what_agrees_and_leave_the_rest() -> None:
    """Every norm and gate of a Llama is swapped; a norm that differs stays what it was."""
    network: Any = build("LlamaConfig")
    original = network.model.layers[2].input_layernorm

    class OddRMSNorm(type(original)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 1.5  # type: ignore[no-any-return]

    odd = OddRMSNorm(64)
    network.model.layers[2].input_layernorm = odd
    assert swaps.apply(network) == 4 * 3 + 1 - 1
    assert network.model.layers[2].input_layernorm is odd
    assert isinstance(network.model.norm, swaps.FusedRMSNorm)
    assert isinstance(network.model.layers[0].mlp, swaps.FusedGatedMLP)
