"""Log-probabilities of rows of logits."""

from __future__ import annotations

import pytest
import torch

from engine.stepping.scores import ROWS_AT_ONCE, score


@pytest.mark.parametrize("num_top", [0, 3])
def test_scores_come_from_raw_logits_with_as_many_places_as_are_asked_for(num_top: int) -> None:
    """Over more rows than are scored at once."""
    rows = ROWS_AT_ONCE + 3
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(2))
    scores = score(logits, torch.arange(rows), num_top)
    expected = logits.double().log_softmax(-1)
    best = expected.topk(num_top)
    assert scores.logprobs.tolist() == pytest.approx(expected.diagonal().tolist(), abs=1e-5)
    assert scores.top_ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(scores.top_logprobs.double(), best.values, atol=1e-5, rtol=0)


def test_more_places_than_tokens_are_all_tokens() -> None:
    """A vocabulary can be smaller than twenty."""
    assert score(torch.zeros(1, 3), torch.tensor([1]), 20).top_ids.shape == (1, 3)
