"""Failed rows of a batch, summarised by kind of error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from pydantic_core import from_json

from tidemill.batch.file.rows import row_error_message
from tidemill.offline.console.error_summary import ErrorSummary
from tidemill.offline.console.errors import CliError
from tidemill.offline.console.terminal import amount, log

if TYPE_CHECKING:
    from ..api.client import Client
    from ..api.objects import Batch


# How much of an error file on the server is read.
_HEAD_BYTES = 2**20


def failures_in(path: Path) -> ErrorSummary:
    """Summarise the failures in a file of rows; other lines are skipped."""
    with path.open("rb") as file:
        return _failures_among(file)


def first_failures(client: Client, batch: Batch) -> ErrorSummary:
    """Summarise the first failures of a batch on the server; empty if they cannot be read."""
    try:
        if batch.error_file_id is not None:
            return _failures_among(_head_of(client, batch.error_file_id).splitlines())
        summary = ErrorSummary()
        for row in client.rows(batch.id, 0).rows if batch.failed else ():
            if (message := row_error_message(row)) is not None:
                summary.add(message, row["line"])
    except (CliError, httpx.TransportError):
        return ErrorSummary()  # the files may be gone; the caller shows the rest
    return summary


def _head_of(client: Client, file_id: str) -> bytes:
    head = b""
    with client.open_content(file_id, 0) as response:
        if response.is_error:
            return b""
        for chunk in response.iter_bytes():
            head += chunk
            if len(head) > _HEAD_BYTES:
                return head[: head.rfind(b"\n")]
    return head


def _failures_among(rows: Iterable[bytes]) -> ErrorSummary:
    summary = ErrorSummary()
    for data in rows:
        try:
            row = from_json(data)
        except ValueError:
            continue
        if isinstance(row, dict) and (message := row_error_message(row)) is not None:
            summary.add(message)
    return summary


def log_failures(summary: ErrorSummary, place: str | None = None) -> None:
    """Log why rows failed and where they are; nothing when none did."""
    if summary.count:
        where = f", in {place}" if place is not None else ""
        log("\n".join((f"{amount(summary.count, 'row')} failed{where}:", *summary.sentences())))
