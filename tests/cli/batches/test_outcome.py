"""Tests of a batch's printed tokens and cost."""

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
def test_only_existing_token_counts_are_shown(usage: dict[str, Any], words: str) -> None:
    """Generated tokens and reasoning tokens are shown only if there are any."""
    assert tokens_of(usage) == words


@pytest.mark.parametrize(
    ("cost", "estimated", "words"),
    [(None, None, ""), (1.25, None, "1.25"), (0.0, 14.0, "0 of about 14")],
)
def test_a_cost_is_shown_with_the_estimate(
    cost: float | None, estimated: float | None, words: str
) -> None:
    """Older servers do not estimate the cost, and deployments without a price have none."""
    assert cost_words({"cost": cost, "estimated_cost": estimated}) == words
    assert cost_words({}) == ""
