"""Sequences packed into steps by their tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine.loop.encoding import pack_steps


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    max_tokens=st.integers(1, 64),
    max_sequences=st.integers(1, 8),
)
def test_each_sequence_runs_once_in_a_step_that_fits(
    lengths: list[int], max_tokens: int, max_sequences: int
) -> None:
    """Only one that alone has more tokens than a step may hold runs in a larger one, alone."""
    steps = pack_steps(np.array(lengths, np.int64), max_tokens, max_sequences)
    assert sorted(index for step in steps for index in step) == list(range(len(lengths)))
    for step in steps:
        assert 1 <= len(step) <= max_sequences
        assert len(step) == 1 or sum(lengths[index] for index in step) <= max_tokens


def test_those_of_a_length_run_together_and_the_longest_first() -> None:
    """So a step's sequences take about as long as each other."""
    steps = pack_steps(np.array([3, 9, 1, 8, 3]), max_tokens=12, max_sequences=9)
    assert [step.tolist() for step in steps] == [[1], [3, 0], [4, 2]]
