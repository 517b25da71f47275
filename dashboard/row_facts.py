"""Values of a row by which it is searched and exported: its status, its answer or its error.

Rows are the bytes of any client and of any model: whatever they contain, they have facts, or are
not rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic_core import from_json

from tidemill.batch.file.answers import Answer, answer_of, named_answers
from tidemill.batch.file.rows import has_truncated_answer, row_error_message

from .failures import error_of
from .visible_text import visible

Status = Literal["ok", "failed", "truncated"]

_MAX_NAME_CHARS: Final = 200
_MAX_DEPTH: Final = 200


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The values of a row by which rows are searched; `text` is the answer, or the error.

    `confidence` is the lowest one of the answer.
    """

    custom_id: str | None
    status: Status
    text: str
    status_code: int | None = None
    error_code: str = ""
    reasons: tuple[str, ...] = ()
    num_tokens: int | None = None
    confidence: float | None = None


def facts_of(data: bytes) -> RowFacts | None:
    """Return the facts of a row; None for bytes that are not a row."""
    row = parse_json(data)
    return row_facts(row) if isinstance(row, dict) else None


def row_facts(row: Mapping[str, Any]) -> RowFacts:
    """Return the facts of a parsed row."""
    response = fields_in(row.get("response"))
    status_code = response.get("status_code")
    custom_id = row.get("custom_id")
    body = response.get("body")
    message = row_error_message(row)
    is_error = isinstance(status_code, int) and status_code >= 400
    common: dict[str, Any] = {
        "custom_id": None if custom_id is None else str(custom_id),
        "status_code": status_code if isinstance(status_code, int) else None,
    }
    if message is not None or is_error or not isinstance(body, dict):
        error = error_of(row)
        code = error.get("code") or error.get("type") or ""
        return RowFacts(
            **common, status="failed", text=message or "", error_code=short_name(as_text(code))
        )
    answer = answer_in(body)
    return RowFacts(
        **common,
        status="truncated" if has_truncated_answer(body) else "ok",
        text="\n".join(answer.texts),
        reasons=tuple(dict.fromkeys(map(short_name, answer.finish_reasons))),
        num_tokens=answer.num_tokens,
        confidence=min(_confidences_of(body), default=None),
    )


def answer_in(body: Mapping[str, Any]) -> Answer:
    """Return the answer in a body; the JSON is the text of a malformed one."""
    try:
        return answer_of(body)
    except (TypeError, ValueError, AttributeError, RecursionError):
        return Answer((as_text(body),))


def _confidences_of(body: Mapping[str, Any]) -> Iterator[float]:
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        yield from confidences_in(fields_in(choice).get("confidence"))
    for _, answer in named_answers(body.get("answers")):
        yield from confidences_in(answer)


def confidences_in(value: object) -> Iterator[float]:
    """Yield the confidences within a value, which a schema or the tool calls may nest."""
    if isinstance(value, list):
        for each in value:
            yield from confidences_in(each)
    for name, each in value.items() if isinstance(value, dict) else ():
        if name == "confidence" and isinstance(each, int | float):
            yield each
        elif name != "probabilities":
            yield from confidences_in(each)


def parse_json(data: bytes) -> Any:
    """Return JSON; None for other bytes, or for JSON that is nested too deeply."""
    for parse in (from_json, json.loads):  # only the second reads unpaired surrogates
        try:
            found = parse(data)
        except (ValueError, RecursionError):
            continue
        return found if parse is from_json or _is_shallow(found) else None
    return None


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [each for each in level if isinstance(each, list | dict)]
        level = [
            child
            for each in nested
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return not level


def fields_in(value: object) -> dict[str, Any]:
    """Return an object as it is, and an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def short_name(value: object) -> str:
    """Return a visible text of bounded length."""
    text = str(value)
    return visible(text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}…")


def as_text(value: object) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
