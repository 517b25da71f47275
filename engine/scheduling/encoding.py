"""One sequence to encode: its request and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]

EncodingOutput = Literal["pooled", "token_vectors", "token_weights", "image"]
"""The output of a sequence: its own, or that of each token: a vector or a weight; or an image's."""


class SchemaSpans(NamedTuple):
    """The questions of a decision within a sequence, for a head over all of its tokens.

    A question has a kind, numbered as its head's embeddings, the span of its text, and a span for
    each of its options; a span is the index of its first token, and of the token after its last.
    """

    kinds: tuple[int, ...]
    questions: tuple[Span, ...]
    options: tuple[tuple[Span, ...], ...]


class EncodingImage(NamedTuple):
    """An image of the size that its tower reads, `[S, S, 3]`; equal ones have equal digests."""

    pixels: NDArray[np.uint8]
    digest: bytes


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """The tokens of one sequence, including special ones, and the segment of each.

    `type_ids` are set if two texts are read together; with None all tokens belong to the first
    segment. The first `num_skipped` tokens are read, but excluded from pooling. No token of a
    bidirectional network attends to the last `num_unseen`. With a `priority`
    it is interactive and comes before rows of files, which have none; a lower number comes first.
    With `schema` the output is a logit for each option. An `image` is the content of a sequence
    whose output is "image", and each of its tokens stands for a patch.
    """

    token_ids: list[int]
    type_ids: list[int] | None = None
    num_skipped: int = 0
    num_unseen: int = 0
    priority: int | None = None
    schema: SchemaSpans | None = None
    output: EncodingOutput = "pooled"
    image: EncodingImage | None = None

    @property
    def has_types(self) -> bool:
        """Return whether a token belongs to a segment after the first."""
        return self.type_ids is not None and any(self.type_ids)


@dataclass(frozen=True, slots=True)
class EncodingResult:
    """A model's output for one sequence: a vector `[D]`, or scores or logits, in fp32.

    Outputs of tokens are `[t, D]`, special tokens included. Sparse ones are `[n, 2]`: a dimension,
    which is exact below 2²⁴, and its value, by dimension.

    The endpoint normalizes vectors and applies the activation of scores.
    """

    values: NDArray[np.float32]
    num_tokens: int

    @property
    def num_values(self) -> int:
        """Return the number of values in its body."""
        return self.values.size
