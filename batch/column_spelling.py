"""How templates write a column, without Jinja: files of requests get advice from here, too."""

from __future__ import annotations

from typing import Final

ROW: Final = "row"
"""Variable with all cells of a row, for columns whose name is not a word."""

RESERVED: Final = frozenset(
    "true false none True False None not and or in is if else recursive".split()
)
"""Jinja keywords that a template cannot always use as a column's name."""


def spelling_of(column: str) -> str:
    """Return a column's name as written in templates."""
    is_name = column.isidentifier() and column not in RESERVED
    return column if is_name else f"{ROW}[{quoted(column)}]"


def expression_of(column: str) -> str:
    """Return the expression that prints a column."""
    return f"{{{{ {spelling_of(column)} }}}}"


def quoted(key: str | int) -> str:
    """Return a key in brackets as written in templates."""
    if isinstance(key, int):
        return str(key)
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
