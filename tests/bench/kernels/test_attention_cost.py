"""Cost of attention: the timed steps match their names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.kernels.attention_cost import CPU, Sequences, attending, flash
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.cpu.tile_plan import plan_tiles

SHAPE = AttentionShape(4, 2, 16, 16, 0.25)


@pytest.mark.parametrize(
    ("sequences", "num_decodes", "num_phases"),
    [
        (Sequences(3, 200, 1), 3, 1),
        (Sequences(20, 200, 1, shared=128), 20, 2),
        (Sequences(2, 50, 30), 0, 1),
    ],
)
def test_a_step_has_the_pages_that_it_says(
    sequences: Sequences, num_decodes: int, num_phases: int
) -> None:
    """Shared ones are met together, own ones by each."""
    step, num_pages = sequences.step()
    assert step.num_decodes == num_decodes
    assert step.num_tokens == sequences.count * sequences.tokens
    assert int(step.pages.max()) < num_pages
    assert len(plan_tiles(step, 2, (2, 2, 18)).phases) == num_phases
    assert len(np.unique(step.slots.numpy())) == step.num_tokens


def test_both_sides_run() -> None:
    """Steps with and without contexts run."""
    assert torch.device("cpu") == CPU
    for sequences in (Sequences(2, 20, 10), Sequences(2, 0, 10)):
        attending(SHAPE, sequences)()
        flash(SHAPE, sequences)()
