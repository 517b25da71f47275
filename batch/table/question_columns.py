"""Question columns: the probabilities of a question's options as typed columns of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from .questions import Probabilities, TableQuestion, winner_of


def question_fields(question: TableQuestion) -> list[pa.Field]:
    """Return the columns of a question: answer, mean of a score, confidence and probabilities."""
    are_booleans = all(isinstance(option.value, bool) for option in question.options)
    shares = pa.struct([(option.text, pa.float64()) for option in question.options])
    number = pa.float64()
    score = [number] if question.kind == "score" else []
    types = [pa.bool_() if are_booleans else pa.string(), *score, number, shares]
    return [pa.field(name, kind) for name, kind in zip(question.columns, types, strict=True)]


def question_columns(
    question: TableQuestion, rows: Sequence[Probabilities | None]
) -> dict[str, pa.Array]:
    """Return the columns of `question_fields` for some rows; null for a row without an answer."""
    fields = question_fields(question)
    values = [_cells(question, fields[0].type, row) for row in rows]
    columns = zip(*values, strict=True) if values else [()] * len(fields)
    return {
        field.name: pa.array(column, field.type)
        for field, column in zip(fields, columns, strict=True)
    }


def _cells(question: TableQuestion, kind: pa.DataType, row: Probabilities | None) -> list[Any]:
    if row is None:
        return [None] * len(question.columns)
    winner = winner_of(row)
    option = question.options[winner]
    value = option.value if pa.types.is_boolean(kind) else option.text
    score = []
    if question.kind == "score":
        score = [sum(level * share for level, share in enumerate(row))]
    shares = {each.text: share for each, share in zip(question.options, row, strict=True)}
    return [value, *score, row[winner], shares]
