"""Calibration of tables: the keys of a recipe, the gold columns, and the calibrated columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pyarrow as pa
import pytest
from pydantic_core import to_json

from tidemill.batch.calibration.calibration import Method
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.questions import question_columns_at_end
from tidemill.batch.table.recipe import CALIBRATION, parse_recipe
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts
from tidemill.batch.table.result_rows import finished_columns, output_batches
from tidemill.batch.table.table_check import checked_template
from tidemill.offline.arguments.calibration_flags import METHODS, NAMES

_ONE = {"ask": "good: Is it good?", "prompt": "{{ text }}"}
_TWO = {**_ONE, "ask": ["good: Is it good?", "team = a|b: Which?"]}
_NUM_ROWS = 60


def _table(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch({"text": ["x"] * _NUM_ROWS, **columns})


def _rows() -> list[bytes]:
    """Return rows that are sure of yes: good ones with 0.9, others with 0.7; the last failed."""
    rows = []
    for number in range(_NUM_ROWS):
        share = (0.7 if number % 2 else 0.9) + number / 1000
        answers = [{"probability": share}, {"probabilities": [{"probability": 0.5}] * 2}]
        body = {"answers": answers, "usage": {"input_tokens": 1}}
        rows.append(to_json({"response": {"status_code": 200, "body": body}, "error": None}))
    rows[-1] = to_json({"response": None, "error": {"code": "c", "message": "no"}})
    return rows


def _output(keys: dict[str, Any], kept: pa.RecordBatch) -> tuple[pa.Table, ResultColumns]:
    recipe, rows = parse_recipe(keys), _rows()

    def read(columns: ResultColumns) -> Iterator[pa.RecordBatch]:
        return output_batches(columns, [kept], iter(rows))

    columns = finished_columns(recipe, kept.schema, ResultFacts(), read)
    return pa.Table.from_batches(read(columns), columns.schema), columns


def test_gold_answers_calibrate_all_rows_and_the_raw_probabilities_stay() -> None:
    """The answers become right, and the report has the accuracy before and after."""
    gold = _table(label=[["yes", "no"][number % 2] for number in range(_NUM_ROWS)])
    made, columns = _output({**_ONE, "gold": "label"}, gold)
    assert made.schema.names == [
        *("text", "label", "good", "good_confidence", "good_probabilities"),
        *("good_raw_probabilities", "calibrated", "usage", "error"),
    ]
    assert made["good"].to_pylist()[:4] == [True, False, True, False]
    assert made["good_raw_probabilities"].to_pylist()[0]["true"] == 0.9
    assert made["calibrated"].to_pylist()[-2:] == [True, None]
    assert made["good_raw_probabilities"].to_pylist()[-1] is None
    [summary] = columns.summaries()
    assert summary["values"] == {"true": 30, "false": 29}
    report = summary["calibration"]
    assert (report["gold_rows"], report["method"]) == (59, "platt")
    assert report["before"]["accuracy"] == pytest.approx(30 / 59)
    assert report["after"]["accuracy"] > 0.9


def test_batch_calibration_centers_the_answers_on_the_prior() -> None:
    """It needs no gold column; half of the answers become no."""
    made, columns = _output({**_TWO, "calibrate": "batch", "prior": "even"}, _table())
    assert 28 <= made["good"].to_pylist().count(True) <= 31
    assert made["team_confidence"].to_pylist()[0] == pytest.approx(0.5)
    assert columns.calibration is not None
    assert "good: batch calibration fitted on 59 rows" in [*columns.calibration.report_lines()]


def test_a_question_with_too_few_answered_gold_rows_stays_uncalibrated() -> None:
    """The report says why, and `calibrated` is false."""
    gold = _table(label=[None] * (_NUM_ROWS - 9) + [True] * 9)
    made, columns = _output({**_ONE, "gold": "label"}, gold)
    assert made["calibrated"].to_pylist()[0] is False
    assert made["good_probabilities"].to_pylist() == made["good_raw_probabilities"].to_pylist()
    assert columns.calibration is not None
    [line] = columns.calibration.report_lines()
    assert "good: not calibrated, because `good` has 8 rows with a gold answer" in line


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({**_ONE, "calibrate": "batch"}, "batch calibration needs a `prior`"),
        ({**_ONE, "calibrate": "batch", "prior": "2"}, "'2' is not a prior of `good`"),
        ({**_ONE, "prior": "even"}, "`prior` needs `calibrate`"),
        ({**_ONE, "calibrate": "platt"}, "needs `gold`"),
        ({**_ONE, "calibrate": "magic"}, "must be one of batch, platt, isotonic"),
        ({**_ONE, "gold": "label", "prior": "even"}, "`prior` is used only by"),
        ({**_TWO, "gold": "label"}, "2 questions: write QUESTION=COLUMN, with one of good, team"),
        ({**_TWO, "gold": {"god": "label"}}, "`gold` has 'god': it must be one of good, team"),
        ({**_TWO, "gold": ["good=a", "good=b"]}, "two columns for one question"),
        ({**_ONE, "gold": 3}, "`gold` must be a column"),
        ({"prompt": "{{ text }}", "gold": "label"}, "`gold` needs questions"),
    ],
)
def test_an_invalid_plan_is_an_error(keys: dict[str, Any], words: str) -> None:
    """The error names the key and a way out."""
    with pytest.raises(RecipeError, match=words):
        parse_recipe(keys)


@pytest.mark.parametrize(
    ("keys", "labels", "words"),
    [
        ({"gold": "lable"}, [True], "`lable`, which is not a column"),
        ({"gold": "label", "keep": ["text"]}, [True], "add it to `keep`"),
        ({"gold": "label", "prompt": "{{ text }} {{ label }}"}, [True], "must not see them"),
        ({"gold": "label"}, ["yes", "maybe"], r"column `label`, row 2: 'maybe' is not an answer"),
        ({"gold": "label"}, ["yes"] * 9 + [None], "has 9 gold answers to `good`"),
    ],
)
def test_an_unsuitable_gold_column_is_an_error_before_the_run(
    keys: dict[str, Any], labels: list[Any], words: str
) -> None:
    """All rows are checked, since only their answers show an invalid one."""
    batch = pa.record_batch({"text": ["x"] * len(labels), "label": labels})
    with pytest.raises(RecipeError, match=words):
        checked_template(
            parse_recipe({**_ONE, **keys}), batch.schema, None, lambda names: [batch.select(names)]
        )


def test_the_model_does_not_see_gold_columns_without_a_prompt() -> None:
    """Without a prompt, questions are about all other columns."""
    recipe = parse_recipe({"ask": "good: Is it good?", "gold": "label"})
    schema = pa.schema([("text", pa.string()), ("label", pa.bool_())])
    assert checked_template(recipe, schema, None).columns == ("text",)


def test_the_flags_have_the_methods_and_keys_of_recipes() -> None:
    """They are repeated there, because help must not load this package."""
    assert get_args(Method) == METHODS
    assert CALIBRATION == NAMES


def test_calibrated_columns_are_found_at_the_end_of_a_table() -> None:
    """The last question includes the column `calibrated`."""
    found = parse_recipe({**_TWO, "calibrate": "batch", "prior": "even"}).questions
    names = ["text", *found[0].columns, *found[1].columns, "calibrated"]
    assert question_columns_at_end(names) == [
        found[0].columns,
        (*found[1].columns, "calibrated"),
    ]
