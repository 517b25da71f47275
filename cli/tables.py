"""Tables on standard output: columns with two spaces between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cli.terminal import Colour, painted, plain


def columns(
    rows: Sequence[Sequence[str]], colours: Mapping[str, Colour] | None = None
) -> list[str]:
    """Return a line for each row, of as many cells as all others; `colours` are those of cells."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            painted(cell.ljust(width), (colours or {}).get(cell))
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]
