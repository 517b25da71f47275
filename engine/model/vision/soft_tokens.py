"""Images of as many tokens as fit a budget: Gemma 4's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...scheduling.images import Fit

# Numbers of tokens that the family's models were trained with.
BUDGETS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True, slots=True)
class SoftTokens:
    """An image keeps its shape, enlarged or reduced to whole squares of `square` pixels.

    Each is a token, of `most` at most.
    """

    square: int
    most: int

    def fit(self, height: int, width: int) -> Fit:
        """Return the most squares in the shape of an image; one side has at least one."""
        side = math.sqrt(self.most * self.square**2 / (height * width))
        rows, columns = (math.floor(side * length / self.square) for length in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return Fit(rows * self.square, columns * self.square, rows, columns)
