"""One sequence to be encoded: what is asked of the loop, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """The tokens of one sequence, special ones among them, and the segment that each belongs to.

    `type_ids` are told where two texts are read together; None: all are of the first segment. The
    first `num_skipped` tokens are read, but left out of what is pooled. Somebody waits for one
    whose `priority` is above 0: it comes before all others.
    """

    token_ids: list[int]
    type_ids: list[int] | None = None
    num_skipped: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EncodingResult:
    """A model's output for one sequence: a vector `[D]`, or scores `[labels]`, in fp32.

    Neither is normalised nor passed through an activation: that is the endpoint's.
    """

    values: NDArray[np.float32]
    num_tokens: int

    @property
    def num_values(self) -> int:
        """Return how many numbers a body would show of it."""
        return len(self.values)
