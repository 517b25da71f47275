"""Timestamps of tokens: the path through the attention of heads is transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidemill.engine.model.speech.alignment import align_tokens, dynamic_time_warping, median_filter


@pytest.mark.parametrize(("tokens", "places"), [(1, 1), (1, 9), (7, 3), (12, 40), (30, 30)])
def test_the_cheapest_way_is_that_of_transformers(tokens: int, places: int) -> None:
    """Many costs are equal, so that ties count."""
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    rng = np.random.default_rng(tokens)
    for cost in (rng.standard_normal((tokens, places)), rng.integers(0, 3, (tokens, places)) / 2):
        expected = _dynamic_time_warping(cost)
        for got, wanted in zip(dynamic_time_warping(cost), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("places", [2, 3, 20])
def test_medians_are_those_of_transformers(width: int, places: int) -> None:
    """One window is shorter than its neighbourhood."""
    from transformers.models.whisper.generation_whisper import _median_filter

    x = torch.randn(2, 5, places, generator=torch.Generator().manual_seed(0))
    assert torch.equal(median_filter(x, width), _median_filter(x, width))


def test_tokens_that_look_one_after_the_other_begin_so() -> None:
    """Each token begins where its part of the window begins."""
    looks = torch.full((2, 3, 30), 0.01)
    for token in range(3):
        looks[:, token, 10 * token : 10 * token + 10] = 1.0
    assert align_tokens(looks, 1).tolist() == [0, 10, 20]


def test_a_single_token_begins_where_its_window_does() -> None:
    """It has nothing to be compared with."""
    assert align_tokens(torch.rand(2, 1, 30), 7).tolist() == [0]
    assert align_tokens(torch.rand(2, 0, 30), 7).tolist() == []
