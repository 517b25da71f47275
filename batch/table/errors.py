"""Errors of tables and recipes; each message is a sentence for whoever made the file."""

from __future__ import annotations

from tidemill.protocol.errors import ProtocolError


class RecipeError(ProtocolError):
    """A recipe that cannot work, or not with this table."""

    code = "invalid_recipe"


class TableError(ProtocolError):
    """A table that cannot be read; the message names the row, where one is known."""

    code = "invalid_table"


class CellError(ProtocolError):
    """A cell that gives no request; `column` is its column, None where several may be meant."""

    code = "invalid_cell"

    def __init__(self, message: str, column: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.column = column
