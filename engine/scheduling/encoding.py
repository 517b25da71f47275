"""One sequence to encode: its request and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]


class SchemaSpans(NamedTuple):
    """The questions of a decision within a sequence, for a head over all of its tokens.

    A question has a kind, numbered as its head's embeddings, the span of its text, and a span for
    each of its options; a span is the index of its first token, and of the token after its last.
    """

    kinds: tuple[int, ...]
    questions: tuple[Span, ...]
    options: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """The tokens of one sequence, including special ones, and the segment of each.

    `type_ids` are set if two texts are read together; with None all tokens belong to the first
    segment. The first `num_skipped` tokens are read, but excluded from pooling. With a `priority`
    it is interactive and comes before rows of files, which have none; a lower number comes first.
    With `schema` the output is a logit for each option, with `wants_tokens` a vector for each
    token.
    """

    token_ids: list[int]
    type_ids: list[int] | None = None
    num_skipped: int = 0
    priority: int | None = None
    schema: SchemaSpans | None = None
    wants_tokens: bool = False


@dataclass(frozen=True, slots=True)
class EncodingResult:
    """A model's output for one sequence: a vector `[D]`, or scores or logits, in fp32.

    Outputs of tokens are `[t, D]`, special tokens included.

    The endpoint normalizes vectors and applies the activation of scores.
    """

    values: NDArray[np.float32]
    num_tokens: int

    @property
    def num_values(self) -> int:
        """Return the number of values in its body."""
        return self.values.size
