"""Texts and token IDs in bodies."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.prompts import num_sequences


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 1),
        ({"messages": [{}, {}]}, 1),
        ({"messages": [], "n": 4}, 4),
        ({"prompt": "one text"}, 1),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1], [2]]}, 2),
        ({"input": ["a", "b"]}, 2),
        ({"query": "q", "documents": ["a", "b", "c"]}, 3),
        ({"prompt": [], "n": 10**9}, 1),
        ({"prompt": {"a": 1}, "n": "x"}, 1),
        ({"prompt": [None], "n": True}, 1),
    ],
)
def test_sequences_of_a_body_are_counted_before_validation(
    body: dict[str, Any], count: int
) -> None:
    """Each choice of each prompt is one; errors in the body are reported later."""
    assert num_sequences(body) == count
