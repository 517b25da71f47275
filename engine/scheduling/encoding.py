"""One sequence to encode: its request and its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """The tokens of one sequence, including special ones, and the segment of each.

    `type_ids` are set if two texts are read together; with None all tokens belong to the first
    segment. The first `num_skipped` tokens are read, but excluded from pooling. A `priority` above
    0 marks an interactive request, which comes before all others.
    """

    token_ids: list[int]
    type_ids: list[int] | None = None
    num_skipped: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EncodingResult:
    """A model's output for one sequence: a vector `[D]`, or scores `[labels]`, in fp32.

    The endpoint normalizes vectors and applies the activation of scores.
    """

    values: NDArray[np.float32]
    num_tokens: int

    @property
    def num_values(self) -> int:
        """Return the number of values in its body."""
        return len(self.values)
