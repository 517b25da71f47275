"""Text tables: aligned columns with two spaces between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .terminal import Colour, coloured, without_control_chars


def columns(
    rows: Sequence[Sequence[str]], colours: Mapping[str, Colour] | None = None
) -> list[str]:
    """Return a line for each row of equal length; `colours` maps cells to colours."""
    cells = [[without_control_chars(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            coloured(cell.ljust(width), (colours or {}).get(cell))
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]
