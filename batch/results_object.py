"""Finished rows of a batch as clients list them, by line."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic_core import from_json

from .model import Batch

GONE_CODE: Final = "work_deleted"
MAX_LISTED_ROWS: Final = 1000
# More than the number of lines in any file.
MAX_LINE: Final = 2**53


class ResultRow(BaseModel):
    """The row of a line, identical to the output or error file."""

    line: int
    id: str | None = None
    custom_id: str | None = None
    response: dict[str, Any] | None = None
    error: Any = None


class ResultsObject(BaseModel):
    """Finished rows in line order; some may still be missing.

    Up to `complete_through` every line has its row on this or an earlier page, or never gets one.
    """

    object: Literal["list"] = "list"
    data: list[ResultRow]
    complete_through: int
    has_more: bool


def result_row(line: int, row: bytes) -> ResultRow:
    """Return a row as clients list it."""
    return ResultRow(line=line, **from_json(row))


def rows_deleted_message(batch: Batch) -> str:
    """Return the error for a batch whose rows can no longer be listed, with its files."""
    files = {"output": batch.output_file_id, "error": batch.error_file_id}
    named = " and ".join(f"{name} file {file_id}" for name, file_id in files.items() if file_id)
    return f"The rows of batch {batch.id} can no longer be listed: " + (
        f"they are in its {named}." if named else "it has no files either."
    )
