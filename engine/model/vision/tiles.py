"""Images as tiles of one size, in a grid near an image's shape, with a small copy of the whole."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduling.images import Fit


@dataclass(frozen=True, slots=True)
class Tiles:
    """An image becomes between `fewest` and `most` square tiles of `tokens` tokens each.

    If there are several, the whole image follows as one more tile. All are stored as one column.
    """

    side: int
    tokens: int
    fewest: int
    most: int

    def fit(self, height: int, width: int) -> Fit:
        """Return the column of all tiles, each a row of tokens."""
        rows, columns = self.grid(height, width)
        count = rows * columns
        count += count > 1
        return Fit(count * self.side, self.side, count, self.tokens)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles: the shape nearest to the image's.

        Of equal shapes it is the one with the most tiles that are less than twice the image's size.
        """
        if self.most == 1:
            return 1, 1
        shape = width / height
        grids = [
            (rows, columns)
            for columns in range(1, self.most + 1)
            for rows in range(1, self.most // columns + 1)
            if rows * columns >= self.fewest
        ]
        nearest = min((abs(shape - columns / rows) for rows, columns in grids), default=None)
        if nearest is None:
            return 1, 1
        equal = [grid for grid in grids if abs(shape - grid[1] / grid[0]) == nearest]
        first, *larger = sorted(equal, key=lambda grid: grid[0] * grid[1])
        fitting = [grid for grid in larger if height * width > self.side**2 * grid[0] * grid[1] / 2]
        return fitting[-1] if fitting else first
