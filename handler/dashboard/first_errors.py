"""The first rows of a batch that went wrong, as people read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from handler.aws.calls import Call, Operation
from handler.batch.model import Batch
from handler.errors import NotThere
from handler.settings import Deployment

MAX_SHOWN: Final = 10
_MAX_BYTES: Final = 2**18
_MAX_CHARS: Final = 600


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What a row tells of its failure; `status` is None for a line that was never run."""

    custom_id: str
    status: int | None
    code: str
    message: str


def first_errors(deployment: Deployment, batch: Batch) -> Operation[list[ErrorRow] | None]:
    """Return the first rows of the error file; None when it cannot be had (any more)."""
    file_id = batch.error_file_id
    file = (yield from deployment.files.get_file(file_id)) if file_id else None
    if file is None:
        return None
    where = {"Bucket": deployment.bucket.name, "Key": file.key}
    try:
        found = yield Call("s3", "get_object", where | {"Range": f"bytes=0-{_MAX_BYTES - 1}"})
    except NotThere:
        return None
    # What lies behind the last newline may be the beginning of a row.
    *rows, _ = found["Body"][:_MAX_BYTES].split(b"\n")
    return [row for row in map(read_row, rows[:MAX_SHOWN]) if row is not None]


def read_row(data: bytes) -> ErrorRow | None:
    """Return what a row tells of its failure, None of one that is none."""
    try:
        row = from_json(data)
    except ValueError:
        return None
    response = _fields(row, "response")
    told = _fields(row, "error") or _fields(response.get("body"), "error")
    # In vLLM's form of rows the error has an error in it.
    told = _fields(told, "error") or told
    status = response.get("status_code")
    return ErrorRow(
        custom_id=_text(_fields({"row": row}, "row").get("custom_id")),
        status=status if isinstance(status, int) else None,
        code=_text(told.get("code") or told.get("type")),
        message=_text(told.get("message")),
    )


def _fields(value: object, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"
