"""A search for rows of a batch, as the address of the page and its form name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self
from urllib.parse import urlencode

from tidemill.batch.parts import RowKind

from .row_facts import RowFacts, facts_of

StatusFilter = Literal["", "ok", "failed", "truncated"]
_KINDS: Final[Mapping[str, frozenset[RowKind]]] = {
    "": frozenset(RowKind),
    "ok": frozenset((RowKind.WHOLE, RowKind.SUCCESS)),
    "truncated": frozenset((RowKind.TRUNCATED, RowKind.SUCCESS)),
    "failed": frozenset((RowKind.FAILED,)),
}
_MAX_TEXT: Final = 500
MAX_LINE: Final = 2**53


class BadQuery(Exception):
    """A value of a search that cannot be searched for; the message names it."""


@dataclass(frozen=True, slots=True)
class RowQuery:
    """A search for rows after a line; empty values do not restrict it.

    `line` is the number of the only row. Lengths are in characters of the answer or the error.
    """

    status: StatusFilter = ""
    code: str = ""
    reason: str = ""
    text: str = ""
    id: str = ""
    min_chars: int | None = None
    max_chars: int | None = None
    max_confidence: float | None = None
    after: int = 0
    line: int | None = None

    @classmethod
    def of(cls, fields: Mapping[str, str], default_status: StatusFilter = "") -> Self:
        """Return the search that these parameters name; raises BadQuery.

        Without any parameter it is for the default status.
        """
        status = fields.get("status")
        if status is None:
            status = "" if any(fields.get(name) for name in _CONDITIONS) else default_status
        status = "" if status == "all" else status
        if status not in _KINDS:
            raise BadQuery(f"Unknown status {status!r}: choose ok, failed or truncated.")
        for name in ("code", "reason", "text", "id"):
            if len(fields.get(name, "")) > _MAX_TEXT:
                raise BadQuery(f"The {_LABELS[name]} must have at most {_MAX_TEXT} characters.")
        line = _number(fields, "line")
        if line == 0:
            raise BadQuery("The line number must be at least 1.")
        return cls(
            status=status,  # type: ignore[arg-type]
            **{name: fields.get(name, "") for name in ("code", "reason", "text", "id")},
            min_chars=_number(fields, "min_chars"),
            max_chars=_number(fields, "max_chars"),
            max_confidence=_share(fields, "max_confidence"),
            after=_number(fields, "after") or 0,
            line=line,
        )

    @property
    def reads_rows(self) -> bool:
        """Say whether rows have to be read to tell whether they match."""
        return any(
            (
                *(self.code, self.reason, self.text, self.id),
                self.min_chars is not None,
                self.max_chars is not None,
                self.max_confidence is not None,
            )
        )

    @property
    def has_details(self) -> bool:
        """Say whether it has a condition other than status, text and custom ID."""
        return bool(self.code or self.reason) or any(
            value is not None for value in (self.min_chars, self.max_chars, self.max_confidence)
        )

    @property
    def begin(self) -> int:
        """Return the first line that may match."""
        return self.after + 1 if self.line is None else self.line

    @property
    def kinds(self) -> frozenset[RowKind]:
        """Return the kinds of rows in an index that may have the status."""
        return _KINDS[self.status]

    def matches_row(self, data: bytes | None, kind: RowKind | None = None) -> bool:
        """Return whether a row meets all conditions; an index may already know its kind.

        A row that is too large to be read (None) has to meet none.
        """
        if data is None:
            return not self.reads_rows
        known = kind is not None and kind is not RowKind.SUCCESS
        query = replace(self, status="") if known else self
        if not (query.status or query.reads_rows):
            return True
        return query.may_match(data) and query.matches(facts_of(data))

    def may_match(self, data: bytes) -> bool:
        """Return False for most rows without the custom ID or the text, from their bytes alone."""
        if b"\\u" in data or b"\\/" in data:
            return True
        if _is_plain(self.id) and self.id.encode() not in data:
            return False
        is_searchable = _is_plain(self.text) and data.isascii()
        return not is_searchable or self.text.lower().encode() in data.lower()

    def matches(self, facts: RowFacts | None) -> bool:
        """Return whether a row meets all conditions; bytes that are not a row have failed."""
        if facts is None:
            return not self.reads_rows and self.status in {"", "failed"}
        text, texts = self.text.casefold(), (facts.text, facts.custom_id or "")
        return all(
            (
                not self.status or facts.status == self.status,
                not self.code or self.code in {facts.error_code, str(facts.status_code)},
                not self.reason or self.reason in facts.reasons,
                not self.id or facts.custom_id == self.id,
                self.min_chars is None or len(facts.text) >= self.min_chars,
                self.max_chars is None or len(facts.text) <= self.max_chars,
                self.max_confidence is None
                or (facts.confidence is not None and facts.confidence <= self.max_confidence),
                not text or any(text in each.casefold() for each in texts),
            )
        )

    def address(self, **changes: Any) -> str:
        """Return the parameters of this search with changes."""
        query = replace(self, **changes)
        values = {name: getattr(query, name) for name in (*_CONDITIONS, "after")}
        given = {name: value for name, value in values.items() if value not in {None, "", 0}}
        return urlencode({"status": query.status or "all", **given})


_CONDITIONS: Final = (
    *("code", "reason", "text", "id", "min_chars", "max_chars", "max_confidence", "line"),
)
_LABELS: Final = {
    "code": "error code",
    "reason": "finish reason",
    "text": "text",
    "id": "custom ID",
    "min_chars": "minimum length",
    "max_chars": "maximum length",
    "max_confidence": "confidence",
    "after": "position",
    "line": "line number",
}


def _is_plain(text: str) -> bool:
    """Return whether JSON contains a text as it is."""
    return text.isascii() and text.isprintable() and not {'"', "\\"} & {*text}


def _number(fields: Mapping[str, str], name: str) -> int | None:
    text = fields.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 17 and int(text) <= MAX_LINE):
        raise BadQuery(f"The {_LABELS[name]} must be a whole number.")
    return int(text)


def _share(fields: Mapping[str, str], name: str) -> float | None:
    text = fields.get(name, "").strip()
    try:
        found = float(text) if text else None
    except ValueError:
        found = -1
    if found is not None and not 0 <= found <= 1:
        raise BadQuery(f"The {_LABELS[name]} must be a number between 0 and 1.")
    return found
