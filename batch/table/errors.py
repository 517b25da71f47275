"""Errors of tables and recipes; each message is a sentence for the file's author."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.protocol.errors import ProtocolError

_MAX_REASON_CHARS = 300


class RecipeError(ProtocolError):
    """A recipe that is invalid, or does not fit its table."""

    code = "invalid_recipe"


class TableError(ProtocolError):
    """A table that cannot be read; the message names the row, if known."""

    code = "invalid_table"


class CellError(ProtocolError):
    """A cell that gives no request; `column` is its column, None if it may be one of several."""

    code = "invalid_cell"

    def __init__(self, message: str, column: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


class NotReadHere(Exception):
    """A column whose cells are read only after the upload; the message has its name and why."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column `{column}` cannot be read here, because {reason}")


RAISED_BY_INPUT = (
    *(ArithmeticError, LookupError, MemoryError, NotImplementedError, RecursionError),
    *(SyntaxError, SystemError, TypeError, ValueError),
)
"""Python exceptions that a hostile table, recipe or template can raise."""


def reason_of(exc: BaseException) -> str:
    """Return an exception's reason, as text after a colon."""
    if isinstance(exc, (RecursionError, IndentationError)) or "nested blocks" in str(exc):
        return "it is nested too deeply"
    if isinstance(exc, MemoryError):
        return "it needs more memory than is available"
    if isinstance(exc, UnicodeDecodeError):
        return "it is not UTF-8"
    first_line = str(exc).strip().split("\n", 1)[0]
    return first_line[:_MAX_REASON_CHARS].rstrip(".") or type(exc).__name__


@contextmanager
def in_words(make: Callable[[str], ProtocolError]) -> Iterator[None]:
    """Raise the error that `make` returns for the reason if hostile input makes Python fail."""
    try:
        yield
    except RAISED_BY_INPUT as exc:
        raise make(reason_of(exc)) from exc
