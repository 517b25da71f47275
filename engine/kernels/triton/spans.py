"""Spans of a step on a GPU, and the rows of their states."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SpanRows(NamedTuple):
    """Span s of packed tokens `starts[s] : starts[s + 1]` goes from row `sources[s]` to `rows[s]`.

    A source of -1 is zeros; a span without tokens has no rows.
    """

    starts: Tensor  # [S + 1]
    sources: Tensor  # [S]
    rows: Tensor  # [S]
