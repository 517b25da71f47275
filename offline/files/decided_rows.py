"""Decided rows: rows with the answers of decisions, in either format."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic_core import from_json, to_json

from tidemill.batch.file.rows import escape_separators

_BUFFER_BYTES: Final = 2**20


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

    def with_model(self, model: str) -> Self:
        """Return the row with the name of the model that answered it."""
        if self.body is None or self.body.get("model") == model:
            return self
        row = from_json(self.data)
        row["response"]["body"]["model"] = model
        return type(self).parse(escape_separators(to_json(row, inf_nan_mode="null")) + b"\n")


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


def read_decided(path: Path) -> Generator[DecidedRow]:
    """Read the rows of a file."""
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        yield from map(DecidedRow.parse, file)
