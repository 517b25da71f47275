"""Rows of a batch as the cells of a table: one schema for the rows of every endpoint.

Columns follow from the first rows with an answer: two for each question of decisions, one for
vectors or scores. Other answers are texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self
from urllib.parse import quote

from tidemill.batch.file.answers import Answer, decision_of, named_answers
from tidemill.batch.table.parquet_writer import CellType, Column, utf8

from .row_facts import answer_in, fields_in, parse_json, row_facts

_MAX_QUESTIONS: Final = 50
_MAX_NAME_CHARS: Final = 60
_MAX_URL_BYTES: Final = 5_000
"""Limit for the columns in a URL, of which API Gateway accepts 10,240 bytes with all headers."""

_FIRST_ROWS: Final = 1_000
_FIRST_BYTES: Final = 3 * 2**20
_MAX_WHOLE: Final = 2**63
_TOO_LARGE: Final = ("row_too_large", "The row is too large: it is in the batch's files.")
_NOT_A_ROW: Final = ("invalid_row", "This line is not a row.")
_FIRST: Final = (Column("line", "whole"), Column("custom_id", "text"), Column("answer", "text"))
_LAST: Final = (
    Column("finish_reason", "text"),
    Column("prompt_tokens", "whole"),
    Column("completion_tokens", "whole"),
    Column("error_code", "text"),
    Column("error", "text"),
)

NumbersColumn = Literal["", "embedding", "scores"]


@dataclass(frozen=True, slots=True)
class ExportShape:
    """The columns that depend on the rows: numbers of answers, and questions by their names."""

    numbers: NumbersColumn = ""
    questions: tuple[str, ...] = ()

    @classmethod
    def of_answers(cls, bodies: Iterable[Mapping[str, Any]]) -> Self:
        """Return the columns that these answers need, as far as a URL has room for them."""
        numbers: NumbersColumn = ""
        questions: dict[str, None] = {}
        for body in bodies:
            names = [str(name) for name, _ in named_answers(body.get("answers"))]
            if names:
                questions |= dict.fromkeys(filter(_is_column, names))
            elif not numbers:
                numbers = _numbers_in(answer_in(body), body)[0]
        shape = cls(numbers, tuple(questions)[:_MAX_QUESTIONS])
        while len(quote(shape.to_text())) > _MAX_URL_BYTES:
            shape = cls(numbers, shape.questions[:-1])
        return shape

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return columns from their text; raises ValueError for any other."""
        found = json.loads(text)
        is_list = isinstance(found, list) and all(isinstance(name, str) for name in found)
        if not is_list or found[:1] not in [[""], ["embedding"], ["scores"]]:
            raise ValueError(text)
        return cls(found[0], tuple(found[1 : _MAX_QUESTIONS + 1]))

    def to_text(self) -> str:
        """Return the columns as text."""
        found = [self.numbers, *self.questions]
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"))

    def columns(self) -> list[Column]:
        """Return all columns, with names that are unique in upper and lower case."""
        numbers = []
        if self.numbers:
            numbers = [Column(self.numbers, "floats" if self.numbers == "embedding" else "doubles")]
        taken = {column.name for column in (*_FIRST, *numbers, *_LAST)}
        questions: list[Column] = []
        for question in self.questions:
            kinds: tuple[tuple[str, CellType], ...] = (("", "text"), ("_probability", "number"))
            for ending, kind in kinds:
                name = f"{question}{ending}"
                while name.casefold() in taken:
                    name += "_"
                taken.add(name.casefold())
                questions.append(Column(name, kind))
        return [*_FIRST, *questions, *numbers, *_LAST]

    def cells(self, line: int, data: bytes | None) -> list[Any]:
        """Return the cells of a row; None replaces one that is too large to be read."""
        row = None if data is None else parse_json(data)
        if not isinstance(row, dict):
            return self._of_failed(line, None, *(_TOO_LARGE if data is None else _NOT_A_ROW))
        facts = row_facts(row)
        if facts.status == "failed":
            error = facts.text or "This row has no answer and no error message."
            return self._of_failed(line, facts.custom_id, facts.error_code or None, error)
        body = row["response"]["body"]
        answer = answer_in(body)
        kind, numbers = _numbers_in(answer, body)
        texts: Sequence[Any] = answer.texts or answer.vectors
        decided = _decided(body) if self.questions else {}
        more: list[Any] = [
            cell for name in self.questions for cell in decided.get(name, (None, None))
        ]
        if self.numbers:
            more.append(numbers if kind == self.numbers else None)
        if kind and kind == self.numbers:
            texts = ()
        usage = fields_in(body.get("usage"))
        return [
            *(line, facts.custom_id, _text_of(texts), *more, ", ".join(facts.reasons) or None),
            *(_tokens(usage, "prompt", "input"), _tokens(usage, "completion", "output")),
            *(None, None),
        ]

    def without_answer(self, cells: Sequence[Any]) -> list[Any]:
        """Return the cells of a row with an error instead of its answer."""
        num_answers = len(cells) - len(_FIRST) - len(_LAST) + 1
        return [*cells[:2], *[None] * num_answers, *cells[-len(_LAST) : -2], *_TOO_LARGE]

    def _of_failed(
        self, line: int, custom_id: str | None, code: str | None, error: str
    ) -> list[Any]:
        nothing = [None] * (2 * len(self.questions) + bool(self.numbers) + 4)
        return [line, custom_id, *nothing, code, error]


def first_answers(rows: Iterable[bytes | None]) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the bodies of the first rows with an answer, and whether more are not needed."""
    bodies: list[Mapping[str, Any]] = []
    num_bytes = 0
    for data in rows:
        row = None if data is None else parse_json(data)
        if data is None or not isinstance(row, dict) or row_facts(row).status == "failed":
            continue
        bodies.append(row["response"]["body"])
        num_bytes += len(data)
        if len(bodies) == _FIRST_ROWS or num_bytes >= _FIRST_BYTES:
            return bodies, True
    return bodies, False


def _is_column(name: str) -> bool:
    """Say whether a question has a column: its name is short, and has no unpaired surrogate."""
    return len(name) <= _MAX_NAME_CHARS and name == utf8(name).decode()


def _numbers_in(answer: Answer, body: Mapping[str, Any]) -> tuple[NumbersColumn, Sequence[float]]:
    """Return the only dense vector of an answer, or its scores; nothing for any other answer."""
    vectors = [vector for vector in answer.vectors if not isinstance(vector, Mapping)]
    if not vectors or len(vectors) < len(answer.vectors) or answer.texts:
        return "", ()
    if "embedding" not in fields_in(next(iter(body.get("data") or ()), None)):
        return "scores", [number for vector in vectors for number in vector]
    return ("embedding", vectors[0]) if len(vectors) == 1 else ("", ())


def _decided(body: Mapping[str, Any]) -> dict[str, tuple[str, float | None]]:
    """Return value and probability of each question; none of malformed answers."""
    found: dict[str, tuple[str, float | None]] = {}
    try:
        for name, answer in named_answers(body.get("answers")):
            text, shares = decision_of(answer)
            found[str(name)] = (text, float(max(shares.values())) if shares else None)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return {}
    return found


def _text_of(texts: Sequence[Any]) -> str | None:
    """Return the only text; several texts, or vectors, as JSON."""
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps([*texts], ensure_ascii=False) if texts else None


def _tokens(usage: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        found = usage.get(f"{name}_tokens")
        if type(found) is int and 0 <= found < _MAX_WHOLE:
            return found
    return None
