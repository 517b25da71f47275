"""The reference's dense attention, against plain softmax attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.kernels.paged import Sequences
from tests.engine.kernels.test_backends import SHAPES
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.reference import attend, attention_mask

LENGTHS = [1, 2, 5, 7, 8, 9, 10, 16, 17, 31]


@pytest.mark.parametrize("kind", SHAPES)
def test_attention_of_whole_sequences_is_plain_softmax_attention(kind: str) -> None:
    """Each query sees itself and the keys before it, within its window."""
    sequences = Sequences.random(SHAPES[kind], LENGTHS)
    for index in range(len(LENGTHS)):
        out = attend(
            sequences.queries[index],
            sequences.keys[index],
            sequences.values[index],
            sequences.shape,
            sequences.sinks,
        )
        torch.testing.assert_close(out.double(), sequences.expected(index), atol=1e-5, rtol=1e-5)


def test_half_precision_is_attended_in_single() -> None:
    """Scores and weights are fp32: the answer is as good as its inputs and its output."""
    sequences = Sequences.random(SHAPES["everything"], LENGTHS, torch.bfloat16)
    out = attend(
        sequences.queries[-1],
        sequences.keys[-1],
        sequences.values[-1],
        sequences.shape,
        sequences.sinks,
    )
    assert out.dtype == torch.bfloat16
    expected = sequences.expected(len(LENGTHS) - 1)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-6)


def test_a_window_is_counted_with_the_query_itself() -> None:
    """Position p sees keys above p - window, and looking both ways those below p + window."""
    shape, cpu = AttentionShape(1, 1, 8, 8, 1.0), torch.device("cpu")
    seen = attention_mask(3, 5, replace(shape, window=2), cpu)
    assert seen.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert attention_mask(2, 3, shape, cpu).int().tolist() == [[1, 1, 0], [1, 1, 1]]
    both_ways = replace(shape, is_causal=False)
    assert attention_mask(2, 3, both_ways, cpu).all()
    seen = attention_mask(3, 3, replace(both_ways, window=2), cpu)
    assert seen.int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
