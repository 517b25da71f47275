"""Sampled accuracy: the decisions of sampled rows compared with the known correct answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..run.run_options import RunOptions

if TYPE_CHECKING:
    from tidemill.batch.table.calibration_plan import CalibrationPlan

    from ..files.table_input import TableInput


class SampledRow(NamedTuple):
    """The row of a sampled line, with the place of the line and the tokens of its answer."""

    place: int
    output_tokens: int
    row: Mapping[str, Any]


def sampled_accuracy(
    options: RunOptions, table: TableInput | None, sample: Sequence[SampledRow]
) -> tuple[Mapping[str, Any], ...]:
    """Return a report for each question whose answers a run would calibrate, from sampled rows.

    Gold answers are those of the sampled rows. A shard of a table has none.
    """
    plan = None if table is None else table.recipe.calibration
    if (plan is None and not options.row_calibration) or options.shard is not None:
        return ()
    from tidemill.batch.calibration.calibration import QuestionFit  # late: few files have one
    from tidemill.batch.table.calibration_plan import calibration_of, options_of

    from ..files.calibrated_rows import add_row, gold_of_rows, plan_of_rows, questions_of_rows

    if table is None or plan is None:
        questions = questions_of_rows((each.row for each in sample), options.input_file)
        plan = plan_of_rows(options.input_file, questions, options.row_calibration)
        gold = [gold_of_rows(plan, each.row) for each in sample]
    else:
        questions = {each.name: options_of(each) for each in table.recipe.questions}
        gold = _gold_of_table(table, plan, [each.place for each in sample])
    fits = {name: QuestionFit(each) for name, each in questions.items()}
    for each, known in zip(sample, gold, strict=True):
        add_row(fits, each.row, known)
    # Most gold answers of a file belong to rows that were not sampled.
    return tuple(
        {**each, "unknown_gold": 0} for each in calibration_of(plan, [*fits.values()]).report
    )


def _gold_of_table(
    table: TableInput, plan: CalibrationPlan, places: Sequence[int]
) -> list[dict[str, int]]:
    """Return the correct answers of the rows at these places, by question."""
    from tidemill.batch.table.table_calibration import gold_answers

    found: dict[int, dict[str, int]] = {place: {} for place in places}
    start = 0
    for batch in table.batches(plan.columns) if plan.columns else ():
        for question in table.recipe.questions:
            for place, answer in enumerate(gold_answers(plan, question, batch), start):
                if answer is not None and place in found:
                    found[place][question.name] = answer
        start += batch.num_rows
    return [found[place] for place in places]
