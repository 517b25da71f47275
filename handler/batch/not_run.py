"""Lines that were never run: why, and the row that each of them gets."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batchfile.lines import LineError, RawLine, parse_line
from engine.batchfile.rows import print_malformed, print_not_run
from handler.batch.parts import FinishedRow

EXPIRED_MESSAGE = "The completion window of the batch ended before this line was run."


@dataclass(frozen=True, slots=True)
class NotRun:
    """What the row of a line says that was not run, and whether it counts as failed."""

    code: str
    message: str
    is_failure: bool


EXPIRED = NotRun("batch_expired", EXPIRED_MESSAGE, is_failure=False)


def row_not_run(raw: RawLine, reason: NotRun) -> tuple[FinishedRow, bool]:
    """Return a line's row and whether it is a failure; a line that is no request is one."""
    is_failure = reason.is_failure
    try:
        line = parse_line(raw)
    except LineError as exc:
        row, is_failure = print_malformed(raw.digest, exc), True
    else:
        row = print_not_run(line.digest, line.custom_id, code=reason.code, message=reason.message)
    return FinishedRow(raw.number, row, is_success=False), is_failure
