"""Calibration of the answers of a table, through `tidemill run` and `tidemill calibrate`."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.batch.calibration.answers import Options
from tidemill.batch.calibration.calibration import Calibration, QuestionMap
from tidemill.batch.calibration.probability_maps import LinearMap
from tidemill.batch.table.recipe import load_recipe, parse_recipe
from tidemill.cli.main import main, parse
from tidemill.offline.console.errors import BadInput, Refused
from tidemill.offline.files import table_output
from tidemill.offline.run.run_flags import options_from
from tidemill.sdk.integrations.batch_answers import BatchAnswers

# With AMX, sums depend on the other rows of a step.
_ASK = ("--ask", "town: Is a town named?", "--prompt", "{{ text }}", "--batch-invariant")
_NUM_ROWS = 24


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a table of texts with gold answers."""
    path = tmp_path / "texts.csv"
    rows = [f"{'Paris' * (n % 3)} {n},{'yes' if n % 3 else 'no'}\n" for n in range(_NUM_ROWS)]
    path.write_text("text,label\n" + "".join(rows))
    return path


def _read(path: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    return found


def test_a_run_calibrates_and_its_calibration_serves_later_runs(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mean log-odds become those of the prior; other layouts are refused; gold needs no model."""
    first = texts.with_name("first.parquet")
    batch = ("--calibrate", "batch", "--prior", "0.3")
    run = ("run", str(texts), *_ASK)
    assert main([*run, "-o", str(first), *batch, "--card-markdown"]) == 0
    made = _read(first)
    odds = [math.log(row["true"] / row["false"]) for row in made["town_probabilities"]]
    assert sum(odds) / _NUM_ROWS == pytest.approx(math.log(0.3 / 0.7), abs=1e-6)
    assert made["calibrated"] == [True] * _NUM_ROWS
    assert (
        "town: batch calibration fitted on 24 rows" in first.with_name("first.card.md").read_text()
    )

    second = texts.with_name("second.parquet")
    saved = ("--calibration", str(first.with_name("first.calibration.json")))
    assert main([*run, "-o", str(second), *saved]) == 0
    assert _read(second) == made
    capsys.readouterr()
    other = [*run, "-o", str(texts.with_name("x.csv")), *saved, "--question-layout", "row_first"]
    assert main(other) == 2
    refusal = capsys.readouterr().err
    assert "--question-layout: questions_first there, row_first here" in refusal

    assert main(["calibrate", str(second), "--gold", "label"]) == 0
    shown = capsys.readouterr().out
    assert "town: platt calibration fitted on 24 rows, measured on 24 of 24 gold rows;" in shown
    assert "fewer than 50 gold rows: these figures are uncertain" in shown
    again = _read(second)
    assert again["town_raw_probabilities"] == made["town_raw_probabilities"]
    assert again["town_probabilities"] != made["town_probabilities"]
    card = json.loads(second.with_name("second.card.json").read_text())
    assert card["questions"][0]["calibration"]["method"] == "platt"
    # The raw probabilities bring the first calibration back.
    assert main(["calibrate", str(second), *batch]) == 0
    assert _read(second) == made


def test_a_csv_output_is_calibrated_like_a_parquet_one(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of an uncalibrated run gets the same columns as a calibrated run's."""
    plain, target = texts.with_name("plain.csv"), texts.with_name("calibrated.csv")
    assert main(["run", str(texts), *_ASK, "-o", str(plain)]) == 0
    assert main(["calibrate", str(plain), "--gold", "label", "-o", str(target)]) == 0
    direct = texts.with_name("direct.csv")
    assert main(["run", str(texts), *_ASK, "-o", str(direct), "--gold", "label"]) == 0
    assert target.read_text() == direct.read_text()
    capsys.readouterr()
    assert main(["calibrate", str(texts), "--gold", "label"]) == 1
    assert "has no columns of questions" in capsys.readouterr().err
    assert main(["calibrate", str(target)]) == 2
    assert main(["calibrate", str(target), "--gold", "lable"]) == 2
    assert "`lable` is not a column of the output" in capsys.readouterr().err
    assert main(["calibrate", str(target), "--gold", "text"]) == 2
    assert "column `text`, row 2: " in capsys.readouterr().err


def test_gold_answers_may_be_in_another_table(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are found by the rows' IDs, and a run and `calibrate` use them alike."""
    source, target, gold = tmp_path / "t.jsonl", tmp_path / "t.csv", tmp_path / "gold.csv"
    source.write_text("".join(f'{{"key": "k{n}", "text": "{n}"}}\n' for n in range(12)))
    reply = "{answers = [{type = 'predicate', probability = 0.75}], usage = {input_tokens = 3}}"
    recipe = "id = 'key'\nask = ['x: Is it?']\nprompt = '{{ text }}'\n"
    (tmp_path / "t.recipe.toml").write_text(f"{recipe}params.reply = {reply}\n")
    gold.write_text("key,x\n" + "".join(f"k{n},{n % 4 > 0}\n" for n in range(1, 12)) + "other,no\n")
    run.has_card = True
    assert run(source, "-o", target, "--gold", gold) == 0
    assert "fitted on 11 rows, measured on 11 of 11 gold rows" in capsys.readouterr().err
    made = target.read_text()
    assert main(["calibrate", str(target), "--gold", str(gold)]) == 0
    assert target.read_text() == made
    gold.write_text("key,x\nk1,yes\nk2,maybe\n")
    assert main(["calibrate", str(target), "--gold", str(gold)]) == 1
    assert "row 2: 'maybe' is not an answer to `x`" in capsys.readouterr().err
    gold.write_text("name,x\nk1,yes\n")
    with pytest.raises(BadInput, match="must have the column `key` and one for each question"):
        run(source, "-o", tmp_path / "y.csv", "--gold", gold)


def test_a_run_that_stops_before_its_table_resumes_to_the_same_bytes(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are raw, so that even another calibration needs no model."""
    source, target = tmp_path / "t.jsonl", tmp_path / "t.csv"
    source.write_text("".join(f'{{"text": "{n}", "gold": {n % 2}}}\n' for n in range(12)))
    reply = "{answers = [{type = 'predicate', probability = 0.75}], usage = {input_tokens = 3}}"
    recipe = "ask = ['x: Is it?']\nprompt = '{{ text }}'\n"
    (tmp_path / "t.recipe.toml").write_text(f"{recipe}params.reply = {reply}\n")
    with monkeypatch.context() as broken:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr(table_output, "open_writer", fail)
        with pytest.raises(Exception, match="cannot be written"):
            run(source, "-o", target, "--gold", "gold")
    assert not target.exists()
    assert run(source, "-o", target, "--gold", "gold", "--resume") == 0
    whole = target.read_bytes()
    assert run(source, "-o", target, "--gold", "gold", "--force") == 0
    assert target.read_bytes() == whole


def test_calibration_flags_need_a_table_with_questions(run: Any, tmp_path: Path) -> None:
    """An unsuitable file is named before the model is loaded."""
    lines, table = tmp_path / "x.jsonl", tmp_path / "t.csv"
    lines.write_text("{}\n")
    table.write_text("text\nx\n")
    ask = ("--ask", "x: Is it?")
    with pytest.raises(Refused, match=r"t\.csv cannot be used: it is not a complete JSON"):
        run(table, *ask, "--calibration", table)
    with pytest.raises(Refused, match=r"the calibration .*no\.json cannot be read"):
        run(table, *ask, "--calibration", tmp_path / "no.json")
    with pytest.raises(Refused, match="--prior requires a recipe"):
        run(table, "--prior", "even")


def test_a_recipe_names_a_calibration_next_to_it(run: Any, tmp_path: Path) -> None:
    """A recipe for a drop contains it, as do those of distributed engines; flags override it."""
    source, target = tmp_path / "t.csv", tmp_path / "out.csv"
    source.write_text("text\n" + "x\n" * 3)
    options = Options("x", "predicate", ("true", "false"))
    fitted = QuestionMap(options, "batch", LinearMap(1.0, (-math.log(9), 0.0)), 9)
    path = tmp_path / "c.calibration.json"
    path.write_text(Calibration({}, (fitted,)).print())
    reply = "{answers = [{type = 'predicate', probability = 0.75}], usage = {input_tokens = 3}}"
    recipe = f"ask = ['x: Is it?']\nprompt = '{{{{ text }}}}'\nparams.reply = {reply}\n"
    (tmp_path / "t.recipe.toml").write_text(f"{recipe}calibration = 'c.calibration.json'\n")
    assert run(source, "-o", target) == 0
    assert "\nx,false,0." in target.read_text()
    table = options_from(parse(["run", "--model", "m", str(source)])).table
    assert table is not None
    inside = parse_recipe(load_recipe(table.print_recipe()))
    assert inside.calibration is not None
    assert inside.calibration.saved == Calibration({}, (fitted,))
    keys = {**load_recipe(recipe), "calibration": str(path)}
    answers = BatchAnswers(keys, pa.schema([("text", pa.string())]))
    path.unlink()
    again = pickle.loads(pickle.dumps(answers))  # noqa: S301 - as on a worker
    assert "x_raw_probabilities" in {field.name for field in again.fields}
    flags = ("--calibrate", "batch", "--prior", "even", "--force")
    assert run(source, "-o", target, *flags) == 0
