"""Decided row: a row with the answers of decisions, in either format, and its confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic_core import from_json, to_json

from tidemill.protocol.errors import RequestError

from .lines import LineError, RawLine, parse_line
from .rows import escape_separators, row_error

ESCALATION_ERROR: Final = "escalation_error"
"""Field of a row, and column of a table: why the second model did not decide the row."""


def has_escalation_error(row: bytes) -> bool:
    """Return whether a printed row is the first model's, because the second one has failed."""
    if b'"%b":{' % ESCALATION_ERROR.encode() not in row:  # few rows are parsed
        return False
    body = DecidedRow.parse(row).body
    return body is not None and ESCALATION_ERROR in body


@dataclass(frozen=True, slots=True)
class DecidedRow:
    """A row; `body` is None if it failed."""

    data: bytes
    row_id: str
    body: Mapping[str, Any] | None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return a printed row."""
        row = from_json(data, cache_strings="keys")
        response = row["response"]
        is_ok = response is not None and response["status_code"] == 200
        return cls(data, row["id"], response["body"] if is_ok else None)

    @property
    def confidence(self) -> float:
        """Return the least confidence of the answers; 0 if an answer is missing."""
        answers = () if self.body is None else self.body["answers"]
        each = answers.values() if isinstance(answers, Mapping) else answers
        return min(map(_confidence, each), default=0.0)

    def is_sure(self, threshold: float | None) -> bool:
        """Return whether a second model with this threshold does not decide the row again."""
        return self.body is not None and threshold is not None and self.confidence >= threshold

    def with_model(self, model: str) -> Self:
        """Return the row with the name of the model that answered it."""
        if self.body is None or self.body.get("model") == model:
            return self
        return self._with(model=model)

    def with_escalation_error(self, model: str, error: Mapping[str, Any]) -> Self:
        """Return an answered row with the error that the second model of this name has given."""
        reason = {"model": model, "code": error.get("code"), "message": error["message"]}
        return self._with(**{ESCALATION_ERROR: reason})

    def or_second(self, second: Self, model: str) -> Self:
        """Return the second model's row, or this one if only the second model has failed."""
        if self.body is None or second.body is not None:
            return second
        return self.with_escalation_error(model, second.error)

    @property
    def error(self) -> Mapping[str, Any]:
        """Return the error of a failed row."""
        error = row_error(from_json(self.data))
        assert error is not None
        return error

    def _with(self, **fields: object) -> Self:
        """Return an answered row with these fields in its body."""
        row = from_json(self.data)
        row["response"]["body"].update(fields)
        return type(self).parse(escape_separators(to_json(row, inf_nan_mode="null")) + b"\n")

    def of_line(self, escalated: RawLine, original: RawLine) -> Self:
        """Return the row of an escalated line with the IDs of the original one."""
        data = self.data.replace(escalated.digest.encode(), original.digest.encode())
        return type(self).parse(data)

    def is_escalated(self, raw: RawLine, threshold: float | None) -> bool:
        """Return whether a second model may be surer: not of a request that is invalid for all.

        Without a threshold, it may be surer of all other decisions.
        """
        if self.body is not None:
            is_decided = "answers" in self.body
            return is_decided and (threshold is None or self.confidence < threshold)
        try:
            line = parse_line(raw)
            # A late import: the control Lambda reads no lines, and starts without the requests.
            from tidemill.protocol.requests import check_request

            check_request(line.url, line.body, None)
        except (LineError, RequestError):
            return False
        return True


def _confidence(answer: Mapping[str, Any]) -> float:
    """Return the probability of the most likely option; 0 for a refusal."""
    shares: Any = answer.get("probabilities")
    if isinstance(shares, Mapping):
        return float(max(shares.values()))
    if isinstance(shares, Sequence):
        return float(max(each["probability"] for each in shares))
    if (probability := answer.get("probability")) is not None:
        return max(float(probability), 1 - float(probability))
    return 0.0
