"""How a batch's tokens are told."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.cli.batches.outcome import cost_words, tokens_of


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ({"input_tokens": 1_000, "output_tokens": 0}, "1,000 in"),
        ({"input_tokens": 1_000, "output_tokens": 20}, "1,000 in, 20 out"),
        (
            {"input_tokens": 5, "output_tokens": 1_000}
            | {"output_tokens_details": {"reasoning_tokens": 900}},
            "5 in, 1,000 out (900 reasoning)",
        ),
    ],
)
def test_tokens_are_told_as_far_as_there_are_some(usage: dict[str, Any], words: str) -> None:
    """Those that are generated, and how many of them were thinking."""
    assert tokens_of(usage) == words


@pytest.mark.parametrize(
    ("cost", "estimated", "words"),
    [(None, None, ""), (1.25, None, "1.25"), (0.0, 14.0, "0 of about 14")],
)
def test_a_cost_is_told_beside_what_all_will_cost(
    cost: float | None, estimated: float | None, words: str
) -> None:
    """An older server estimates nothing, and a deployment without a price tells no cost."""
    assert cost_words({"cost": cost, "estimated_cost": estimated}) == words
    assert cost_words({}) == ""
