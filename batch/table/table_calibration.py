"""Table calibration: maps fitted on the answers of a table, and checks of its gold columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from ..calibration.answers import CalibrationError, Options
from ..calibration.calibration import Calibration, QuestionFit
from ..calibration.report import MIN_GOLD_ROWS
from .calibration_plan import CalibrationPlan, calibration_of, options_of
from .cells import cells_of
from .errors import RecipeError
from .questions import Probabilities, TableQuestion
from .recipe import Recipe

ReadColumns = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]


def fit_calibration(
    plan: CalibrationPlan,
    questions: Sequence[TableQuestion],
    batches: Iterable[pa.RecordBatch],
) -> Calibration:
    """Return the calibration of a plan, with a report of its accuracy on the gold rows.

    `batches` have the gold columns, and the columns of uncalibrated results. A question with too
    few rows has no map. Memory is bounded: see `SampledRows`.
    """
    fits = [QuestionFit(options_of(question)) for question in questions]
    if plan.saved is None or plan.columns:
        for batch in batches:
            for question, fit in zip(questions, fits, strict=True):
                _add_rows(fit, batch, question, plan)
    return calibration_of(plan, fits)


def _add_rows(
    fit: QuestionFit, batch: pa.RecordBatch, question: TableQuestion, plan: CalibrationPlan
) -> None:
    answers = gold_answers(plan, question, batch)
    for row, answer in zip(raw_rows(question, batch), answers, strict=True):
        fit.add(row, answer)


def gold_answers(
    plan: CalibrationPlan, question: TableQuestion, batch: pa.RecordBatch
) -> Sequence[int | None]:
    """Return the index of the correct option of each row; None if it is unknown."""
    if plan.gold_file is not None:
        known = plan.gold_file.answers.get(question.name, {})
        return [known.get(str(cell)) for cell in cells_of(batch.column(plan.gold_file.id_column))]
    if (gold := plan.gold.get(question.name)) is not None:
        return list(map(options_of(question).index, cells_of(batch.column(gold))))
    return [None] * batch.num_rows


def raw_rows(question: TableQuestion, batch: pa.RecordBatch) -> list[Probabilities | None]:
    """Return the uncalibrated probabilities of a question; None for a row without an answer."""
    column = batch.column(question.columns[-1])
    texts = [option.text for option in question.options]
    rows = cells_of(column)
    if not pa.types.is_struct(column.type):  # CSV has structs as JSON
        rows = [json.loads(row) if row else None for row in rows]
    return [None if row is None else tuple(float(row[text]) for text in texts) for row in rows]


def check_gold(
    recipe: Recipe,
    kept: Sequence[str],
    prompt_columns: Sequence[str],
    schema: pa.Schema,
    read: ReadColumns | None,
) -> None:
    """Raise RecipeError for a gold column that is unsuitable, or an invalid answer in it."""
    plan, questions = recipe.calibration, recipe.questions
    assert plan is not None
    for column in plan.columns:
        if column not in schema.names:
            raise RecipeError(f"`gold` names `{column}`, which is not a column of the table")
        if column not in kept:
            raise RecipeError(
                f"`gold` names `{column}`, which the output leaves out: add it to `keep`"
            )
        if column in prompt_columns and column in plan.gold.values():
            raise RecipeError(
                f"the prompt contains `{column}`, the gold answers: the model must not see them, "
                "so remove it from the prompt"
            )
    if read is not None:
        check_gold_answers(plan, questions, read)


def check_gold_answers(
    plan: CalibrationPlan, questions: Sequence[TableQuestion], read: ReadColumns
) -> None:
    """Raise RecipeError for a gold column with an invalid answer, or with too few answers."""
    if not plan.gold:
        return
    options = [options_of(each) for each in questions if each.name in plan.gold]
    counts = _count_gold(plan, options, read)
    for name, count in counts.items():
        if count < MIN_GOLD_ROWS:
            raise RecipeError(
                f"column `{plan.gold[name]}` has {count} gold answers to `{name}`: at least "
                f"{MIN_GOLD_ROWS} are required"
            )


def _count_gold(
    plan: CalibrationPlan, questions: Sequence[Options], read: ReadColumns
) -> dict[str, int]:
    counts = {question.name: 0 for question in questions}
    number = 1
    for batch in read(list(dict.fromkeys(plan.gold.values()))):
        for question in questions:
            column = plan.gold[question.name]
            for row, cell in enumerate(cells_of(batch.column(column)), number):
                try:
                    counts[question.name] += question.index(cell) is not None
                except CalibrationError as exc:
                    raise RecipeError(f"column `{column}`, row {row:,}: {exc}") from exc
        number += batch.num_rows
    return counts
