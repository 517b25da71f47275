"""Steps that are written by hand: spans with their pages, as a step's arrays."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.engine.kernels.paged_step import Span, paged_step

CPU = torch.device("cpu")


def test_tokens_are_on_the_pages_of_their_spans() -> None:
    """Pages behind a span's stop are left out; a decode is a span of one token."""
    spans = [Span(4, 5, np.array([7, 3, 8])), Span(1, 4, np.array([5, 9]))]
    step = paged_step(spans, 2, CPU)
    assert step.num_decodes == 1
    assert step.token_ids.tolist() == [0, 0, 0, 0]
    assert step.positions.tolist() == [4, 1, 2, 3]
    assert step.slots.tolist() == [16, 11, 18, 19]
    assert step.query_starts.tolist() == [0, 1, 4]
    assert step.context_lengths.tolist() == [4, 1]
    assert step.page_starts.tolist() == [0, 3, 5]
    assert step.pages.tolist() == [7, 3, 8, 5, 9]
    assert step.logit_rows.tolist() == [0, 3]


def test_other_arrays_replace_or_join_those_of_the_spans() -> None:
    """Token IDs and wanted rows among them; the rest of the step stays as it is."""
    one = np.array([1])
    step = paged_step([Span(0, 2, one)], 2, CPU, token_ids=np.array([6, 7]), state_rows=one)
    assert step.token_ids.tolist() == [6, 7]
    assert step.slots.tolist() == [2, 3]
    assert step.state_rows is not None
    assert step.state_rows.tolist() == [1]
    assert step.state_sources is None
    every = paged_step([Span(0, 2, one)], 2, CPU, logit_rows=np.arange(2))
    assert every.logit_rows.tolist() == [0, 1]
