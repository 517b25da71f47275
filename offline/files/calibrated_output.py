"""Calibrated output: a result table whose probabilities are calibrated again, without the model.

The raw probabilities stay in the table, so it can be calibrated any number of times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from tidemill.batch.calibration.answers import CalibrationError
from tidemill.batch.calibration.calibration import Calibration
from tidemill.batch.file.lines import FormatError
from tidemill.batch.table.calibration_plan import CalibrationPlan, options_of, plan_of
from tidemill.batch.table.errors import RAISED_BY_INPUT, RecipeError, TableError
from tidemill.batch.table.question_columns import all_question_fields, question_columns
from tidemill.batch.table.questions import (
    CALIBRATED,
    TableOption,
    TableQuestion,
    question_columns_at_end,
)
from tidemill.batch.table.reader import Table, open_table
from tidemill.batch.table.result_columns import PREFIX
from tidemill.batch.table.table_calibration import check_gold_answers, fit_calibration, raw_rows
from tidemill.batch.table.writer import open_writer

from ..console.errors import BadInput, Refused
from .gold_file import gold_path, read_gold
from .new_file import open_new_file
from .table_options import format_of


def calibrate_output(
    source: Path,
    target: Path,
    keys: Mapping[str, Any],
    saved: Calibration | None,
    id_column: str | None,
) -> Calibration:
    """Calibrate a result table, and replace `target` when it is complete; return the calibration.

    Raises BadInput for a table without decisions, and Refused for unsuitable keys.
    """
    with source.open("rb") as file:
        try:
            table = open_table(file)
            decided = _DecidedTable.of(table, str(source))
            path = gold_path(keys)
            options = [*map(options_of, decided.questions)]
            gold = None if path is None else read_gold(path, id_column, options)
            plan = plan_of(keys, options, saved, gold)
            _check_gold_columns(plan, decided.kept)
            check_gold_answers(plan, decided.questions, decided.read)
            calibration = fit_calibration(plan, decided.questions, decided.batches(plan))
            calibration.check_fitted()
            with open_new_file(str(target)) as new, new.opened() as out:
                form = format_of(target.name) or table.format
                writer = open_writer(out, decided.schema, form)
                for batch in table.batches(table.schema.names):
                    writer.write(decided.calibrated(batch, calibration))
                writer.close()
        except RecipeError as exc:
            raise Refused(str(exc)) from exc
        except (CalibrationError, TableError, FormatError, *RAISED_BY_INPUT) as exc:
            raise BadInput(f"{source} cannot be calibrated: {exc}") from exc
    return calibration


def _check_gold_columns(plan: CalibrationPlan, kept: Sequence[str]) -> None:
    for column in plan.columns:
        if column not in kept:
            raise RecipeError(
                f"`{column}` is not a column of the output before its results: they are "
                f"{', '.join(kept)}"
            )


@dataclass(frozen=True, slots=True)
class _DecidedTable:
    """A result table of questions; `schema` is that of its calibrated form.

    `questions` have the columns of the table as it is, and `calibrated_questions` those of the
    output. `kept` are the columns before the results, `rest` the ones after the questions.
    """

    read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
    questions: tuple[TableQuestion, ...]
    kept: tuple[str, ...]
    rest: tuple[str, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, table: Table, name: str) -> Self:
        """Return the questions of an open table; raises BadInput if it has none."""
        names: list[str] = table.schema.names
        bare = [each.removeprefix(PREFIX) for each in names]
        ends = [at for at in range(1, len(bare)) if bare[at - 1 : at + 1] == ["usage", "error"]]
        end = ends[-1] - 1 if ends else 0
        groups = question_columns_at_end(bare[:end])
        if not groups:
            raise BadInput(
                f"{name} has no columns of questions: pass the output of a run with --ask"
            )
        is_calibrated = bare[end - 1] == CALIBRATED
        first = end - sum(map(len, groups))
        if is_calibrated:
            groups[-1] = groups[-1][:-1]
        questions = tuple(_question(table, group, is_calibrated=is_calibrated) for group in groups)
        kept, rest = tuple(names[:first]), tuple(names[end:])
        fields = [
            *map(table.schema.field, kept),
            *all_question_fields([replace(each, is_calibrated=True) for each in questions]),
            *map(table.schema.field, rest),
        ]
        return cls(table.batches, questions, kept, rest, pa.schema(fields))

    def batches(self, plan: CalibrationPlan) -> Iterator[pa.RecordBatch]:
        """Read the raw probabilities and the gold answers."""
        raw = [question.columns[-1] for question in self.questions]
        return self.read(list(dict.fromkeys((*raw, *plan.columns))))

    def calibrated(self, batch: pa.RecordBatch, calibration: Calibration) -> pa.RecordBatch:
        """Return a batch of the whole table with calibrated answers."""
        columns = {name: batch.column(name) for name in (*self.kept, *self.rest)}
        are_decided = [False] * batch.num_rows
        for question in self.questions:
            raw = raw_rows(question, batch)
            are_decided = [
                seen or row is not None for seen, row in zip(are_decided, raw, strict=True)
            ]
            found = calibration.of(question.name)
            rows = [row if row is None or found is None else tuple(found.map(row)) for row in raw]
            columns |= question_columns(replace(question, is_calibrated=True), rows, raw)
        cells = [calibration.is_complete if seen else None for seen in are_decided]
        columns[self.schema.names[-len(self.rest) - 1]] = pa.array(cells, pa.bool_())
        return pa.RecordBatch.from_arrays(
            [columns[field.name] for field in self.schema], schema=self.schema
        )


def _question(table: Table, columns: Sequence[str], *, is_calibrated: bool) -> TableQuestion:
    """Return a question of a table from its columns; CSV has its options in the cells."""
    kind = table.schema.field(columns[-1]).type
    texts: list[str] = []
    if pa.types.is_struct(kind):
        texts = [field.name for field in kind]
    else:
        for batch in table.batches([columns[-1]]):
            cell = next((cell for cell in batch.column(0).to_pylist() if cell), None)
            if cell is not None:
                texts = [*json.loads(cell)]
                break
    are_booleans = texts == ["true", "false"]
    has_score = len(columns) - is_calibrated > 3
    return TableQuestion(
        columns[0],
        "score" if has_score else "predicate" if are_booleans else "choice",
        "",
        tuple(TableOption(text == "true" if are_booleans else text) for text in texts),
        is_calibrated,
    )
