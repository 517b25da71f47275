"""Gold rows: rows of a table whose answers are known, and what a model answered to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tidemill.protocol.decisions.questions import winner_of

from ..calibration.threshold import GoldRow
from ..file.decided_row import DecidedRow
from .questions import TableQuestion, probabilities_of

if TYPE_CHECKING:
    import pyarrow as pa

    from .calibration_plan import CalibrationPlan

Gold = Mapping[str, int]
"""The index of the correct option by question, for the questions whose answer is known."""


class Columns(Protocol):
    """A table whose columns can be read."""

    def batches(self, columns: Sequence[str]) -> Iterable[pa.RecordBatch]:
        """Return the rows with these columns."""


def gold_answers_of(
    table: Columns, plan: CalibrationPlan, questions: Sequence[TableQuestion]
) -> Iterator[Gold]:
    """Yield the gold answers of each row, empty for a row without any."""
    from .table_calibration import gold_answers  # late: pyarrow is slow to load

    for batch in table.batches(plan.columns):
        columns = [gold_answers(plan, each, batch) for each in questions]
        for answers in zip(*columns, strict=True):
            yield {
                question.name: answer
                for question, answer in zip(questions, answers, strict=True)
                if answer is not None
            }


def are_right(row: DecidedRow, gold: Gold, questions: Sequence[TableQuestion]) -> dict[str, bool]:
    """Return whether each answer that is known is right; empty for a failed row."""
    if row.body is None or not gold:
        return {}
    found = {}
    for question, answer in zip(questions, row.body["answers"], strict=True):
        shares = probabilities_of(question, answer)
        if question.name in gold and shares is not None:
            found[question.name] = winner_of(shares) == gold[question.name]
    return found


def gold_row_of(row: DecidedRow, gold: Gold, questions: Sequence[TableQuestion]) -> GoldRow:
    """Return the confidence of an answered row, and how many of its known answers are right."""
    right = are_right(row, gold, questions)
    return GoldRow(row.confidence, sum(right.values()), len(right))
