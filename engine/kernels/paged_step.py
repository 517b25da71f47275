"""Paged step: a step built by hand, for compilation, parity checks and benchmarks.

Its spans name their pages. The steps of running sequences are laid out by `loop/runner.py`, from
the table of all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .step import Step


class Span(NamedTuple):
    """Tokens `start : stop` of a sequence, whose first pages are `pages`, at least up to `stop`."""

    start: int
    stop: int
    pages: NDArray[np.int64]


def paged_step(
    spans: Sequence[Span], page_size: int, device: torch.device, **arrays: NDArray[Any]
) -> Step:
    """Return the step of one or more spans, those of one token first, with all token IDs 0.

    The logits of each span's last token are wanted. `arrays` replace or extend the step's arrays.
    """
    positions = [np.arange(span.start, span.stop) for span in spans]
    pages = [span.pages[: -(-span.stop // page_size)] for span in spans]
    slots = [
        own[place // page_size] * page_size + place % page_size
        for own, place in zip(pages, positions, strict=True)
    ]
    query_starts = np.cumsum([0, *map(len, positions)])
    layout: dict[str, NDArray[Any]] = {
        "token_ids": np.zeros(query_starts[-1], np.int64),
        "positions": np.concatenate(positions),
        "slots": np.concatenate(slots),
        "query_starts": query_starts,
        "context_lengths": np.array([span.start for span in spans]),
        "page_starts": np.cumsum([0, *map(len, pages)]),
        "pages": np.concatenate(pages),
        "logit_rows": query_starts[1:] - 1,
    }
    num_decodes = sum(len(place) == 1 for place in positions)
    return Step.pack(num_decodes, device, **(layout | arrays))
