"""Failures of a batch as rows report them, and grouped by kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from tidemill.batch.file.error_kinds import ErrorCounter

from .visible_text import visible

_MAX_KINDS = 10
_MAX_PLACES = 10
_MAX_CHARS: Final = 600
_MAX_SENTENCE: Final = 160
_SENTENCE_END: Final = re.compile(r"[.!?](?= )")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure as it is displayed; `place` is a line number or a request's ID.

    `status` is None for a line that was never run.
    """

    place: str
    code: str
    message: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Row of the table: `count` failures that differ only in values, and their first places."""

    count: int
    first: Failure
    message: str
    places: str


def group_errors(failures: Iterable[Failure]) -> list[FailureKind]:
    """Return the most frequent kinds of failures, at most ten."""
    counter = ErrorCounter[Failure]()
    for failure in failures:
        counter.add(failure.message, failure, (failure.status, failure.code))
    return [
        FailureKind(kind.count, kind.first[0], kind.message, _places(kind.first))
        for kind in counter.most_frequent(_MAX_KINDS)
    ]


def _places(failures: Sequence[Failure]) -> str:
    named = [failure.place for failure in failures if failure.place]
    listed, num_more = ", ".join(named[:_MAX_PLACES]), len(named) - _MAX_PLACES
    return f"{listed} and {num_more:,} more" if num_more > 0 else listed


def first_sentence(message: str) -> str:
    """Return the first sentence of a message on one line, of a bounded length."""
    text = " ".join(message[:_MAX_CHARS].split())
    end = _SENTENCE_END.search(text)
    sentence = text[: end.end()] if end else text
    if len(sentence) <= _MAX_SENTENCE:
        return sentence
    return f"{sentence[:_MAX_SENTENCE].rsplit(' ', 1)[0]}…"


def read_row(data: bytes) -> Failure | None:
    """Return the failure that a row reports, None for a row without one."""
    try:
        row = from_json(data)
    except ValueError:
        return None
    response, error = _fields(row, "response"), error_of(row)
    status = response.get("status_code")
    return Failure(
        place=_text(_fields({"row": row}, "row").get("custom_id")),
        status=status if isinstance(status, int) else None,
        code=_text(error.get("code") or error.get("type")),
        message=_text(error.get("message")),
    )


def error_of(row: object) -> dict[str, Any]:
    """Return the error that a row reports; empty without one."""
    error = _fields(row, "error") or _fields(_fields(row, "response").get("body"), "error")
    # vLLM's rows have an error within the error.
    return _fields(error, "error") or error


def _fields(value: object, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    text = "" if value is None else visible(str(value))
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"
