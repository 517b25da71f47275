"""Question columns: the probabilities of a question's options as typed columns of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tidemill.protocol.decisions.questions import mean_level, winner_of

from .questions import CALIBRATED, Probabilities, TableQuestion


def all_question_fields(questions: Sequence[TableQuestion]) -> list[pa.Field]:
    """Return the columns of all questions; calibrated ones share the column `calibrated`."""
    fields = [field for question in questions for field in question_fields(question)]
    if any(question.is_calibrated for question in questions):
        fields.append(pa.field(CALIBRATED, pa.bool_()))
    return fields


def question_fields(question: TableQuestion) -> list[pa.Field]:
    """Return the columns of a question: answer, mean of a score, confidence and probabilities."""
    are_booleans = all(isinstance(option.value, bool) for option in question.options)
    shares = [pa.struct([(option.text, pa.float64()) for option in question.options])]
    if question.is_calibrated:
        shares *= 2
    number = pa.float64()
    score = [number] if question.kind == "score" else []
    types = [pa.bool_() if are_booleans else pa.string(), *score, number, *shares]
    return [pa.field(name, kind) for name, kind in zip(question.columns, types, strict=True)]


def question_columns(
    question: TableQuestion,
    rows: Sequence[Probabilities | None],
    raw: Sequence[Probabilities | None] = (),
) -> dict[str, pa.Array]:
    """Return the columns of `question_fields` for some rows; null for a row without an answer.

    `raw` are the uncalibrated probabilities of a calibrated question.
    """
    fields = question_fields(question)
    values = [_cells(question, fields[0].type, row) for row in rows]
    if question.is_calibrated:
        pairs = zip(values, raw, strict=True)
        values = [[*cells, _struct(question, row)] for cells, row in pairs]
    columns = zip(*values, strict=True) if values else [()] * len(fields)
    return {
        field.name: pa.array(column, field.type)
        for field, column in zip(fields, columns, strict=True)
    }


def _cells(question: TableQuestion, kind: pa.DataType, row: Probabilities | None) -> list[Any]:
    if row is None:
        return [None] * (4 if question.kind == "score" else 3)
    winner = winner_of(row)
    option = question.options[winner]
    value = option.value if pa.types.is_boolean(kind) else option.text
    score = [mean_level(row)] if question.kind == "score" else []
    return [value, *score, row[winner], _struct(question, row)]


def _struct(question: TableQuestion, row: Probabilities | None) -> dict[str, float] | None:
    if row is None:
        return None
    return {each.text: share for each, share in zip(question.options, row, strict=True)}
