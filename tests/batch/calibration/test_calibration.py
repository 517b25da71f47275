"""Tests of calibrations, gold answers, priors and reports."""

from __future__ import annotations

import pytest

from tidemill.batch.calibration.answers import CalibrationError, Options, priors_of
from tidemill.batch.calibration.calibration import Calibration, QuestionFit, SampledRows
from tidemill.batch.calibration.report import report_lines

_DAMAGED = Options("damaged", "predicate", ("true", "false"))
_TEAM = Options("team", "choice", ("billing", "shipping", "true", "false"))
_TONE = Options("tone", "score", ("calm", "annoyed", "furious"))
_STARS = Options("stars", "score", ("1", "2", "3"))
_SETTINGS = {"--model": {"name": "m", "digest": "abc"}, "layout": "row_first"}


def _fit(options: Options = _DAMAGED, num_gold: int = 40) -> QuestionFit:
    fit = QuestionFit(options)
    for index in range(max(num_gold, 40)):
        row = [0.9 - index % 7 / 20, 0.1 + index % 7 / 20]
        fit.add(row, int(index % 7 > 2) if index < num_gold else None)
    return fit


@pytest.mark.parametrize(
    ("options", "cell", "index"),
    [
        (_DAMAGED, True, 0),
        (_DAMAGED, " No ", 1),
        (_DAMAGED, 0.0, 1),
        (_DAMAGED, None, None),
        (_DAMAGED, float("nan"), None),
        (_TEAM, "shipping", 1),
        (_TEAM, "true", 2),
        (_TEAM, False, 3),
        (_TONE, "furious", 2),
        (_TONE, 1, 1),
        (_TONE, "1.0", 1),
        (_TONE, " ", None),
        (_STARS, 3.0, 2),
        (_STARS, "1.0", 0),
    ],
)
def test_a_gold_cell_names_an_option(options: Options, cell: object, index: int | None) -> None:
    """Cells may be texts, booleans and numbers; empty ones have no gold answer."""
    assert options.index(cell) == index


def test_a_gold_cell_without_an_option_is_an_error() -> None:
    """The error names the cell, the question and its options."""
    with pytest.raises(CalibrationError, match="'sales' is not an answer to `team`: use billing"):
        _TEAM.index("sales")
    with pytest.raises(CalibrationError, match="'0' is not an answer to `stars`: use 1, 2, 3"):
        _STARS.index("0")


def test_priors_apply_to_all_questions_or_to_one_by_name() -> None:
    """A prior with a name wins over one without."""
    found = priors_of(
        ["even", "damaged: 0.3", "tone: calm=0.5,annoyed=0.3,furious=0.2"], [_DAMAGED, _TEAM, _TONE]
    )
    assert found["damaged"] == pytest.approx((0.3, 0.7))
    assert found["team"] == (0.25,) * 4
    assert found["tone"] == pytest.approx((0.5, 0.3, 0.2))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["1.5"], "use even, or a probability of yes"),
        (["damaged: 0.3", "tone: 0.3"], "is not a prior of `tone`"),
        (["damaged: 0.3"], "`tone` has no prior"),
        (["damaged: 0.3", "tone: calm=0.5,furious=0.5"], "add up to 1"),
        (["damaged: 0.3", "tone: calm=0.5,calm=0.5"], "each option once"),
        (["damaged: 0.3", "tone: sad=1"], "'sad' is not an answer"),
        (["even", "0.5"], "a second prior for all questions"),
    ],
)
def test_an_invalid_prior_is_an_error(texts: list[str], words: str) -> None:
    """The error names the prior and the question."""
    with pytest.raises(CalibrationError, match=words):
        priors_of(texts, [_DAMAGED, _TONE])


@pytest.mark.parametrize("method", ["platt", "isotonic", "batch"])
def test_a_printed_calibration_is_read_back(method: str) -> None:
    """The parsed calibration gives the same probabilities."""
    fit = _fit()
    fitted = fit.batch_map([0.5, 0.5]) if method == "batch" else fit.gold_map(method)  # type: ignore[arg-type]
    calibration = Calibration(_SETTINGS, (fitted,))
    again = Calibration.parse(calibration.print())
    assert again == calibration
    found = again.of("damaged")
    assert found is not None
    assert found.map([0.7, 0.3]) == fitted.map([0.7, 0.3])


_HEAD = '{"object": "decision.calibration", "version": 1, "settings": {}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n", "it is empty: pass the .calibration.json"),
        ("[]", "not a calibration of decisions"),
        ('{"object": "decision.calibration", "version": 2}', "not a calibration of decisions"),
        ("[" * 100_000, "not a complete JSON document"),
        (_HEAD, "not a complete JSON document"),
        (_HEAD + "}", "a damaged calibration"),
        (_HEAD + ', "questions": [], "report": [{}]}', "a damaged calibration"),
        (_HEAD + ', "questions": [{"name": 1, "kind": "choice", "options": ["a"]}]}', "a damaged"),
    ],
)
def test_other_documents_are_not_calibrations(text: str, words: str) -> None:
    """The error says which file is expected."""
    with pytest.raises(CalibrationError, match=words):
        Calibration.parse(text)


def test_a_calibration_of_other_questions_is_refused_by_name() -> None:
    """The error names the question, and its options in the calibration."""
    calibration = Calibration(_SETTINGS, (_fit().gold_map("platt"),))
    with pytest.raises(CalibrationError, match="no question `tone`, only damaged"):
        calibration.check_questions([_DAMAGED, _TONE])
    with pytest.raises(CalibrationError, match=r"other options in the calibration \(true, false"):
        calibration.check_questions([Options("damaged", "choice", ("yes", "no"))])


def test_sampled_rows_are_bounded_and_evenly_spread() -> None:
    """Every second or fourth row stays if there are more than fit."""
    sample = SampledRows[int](most=10)
    for index in range(25):
        sample.add(index)
    assert sample.rows == [0, 4, 8, 12, 16, 20, 24]
    assert sample.num_rows == 25


def test_few_gold_rows_are_reported_and_too_few_are_an_error() -> None:
    """Fewer than 50 are uncertain, fewer than 10 are not enough."""
    fit = _fit()
    lines = [*report_lines(fit.report(fit.gold_map("platt")))]
    assert "fewer than 50 gold rows: these figures are uncertain" in lines[1]
    with pytest.raises(CalibrationError, match="`damaged` has 9 rows with a gold answer"):
        _fit(num_gold=9).gold_map("platt")


def test_a_report_has_accuracy_by_threshold_and_a_plot() -> None:
    """It states the rows that a target accuracy accepts, and draws the reliability."""
    fit = _fit(num_gold=70)
    text = "\n".join(report_lines(fit.report(fit.gold_map("platt"))))
    assert "accuracy 42.9% before" in text
    assert "accept 100% of all rows at 100% accuracy" in text
    assert "####" in text


def test_shares_are_of_all_rows_and_thresholds_of_gold_rows() -> None:
    """The gold rows are the confident ones, which are a quarter of all rows."""
    fit = QuestionFit(_DAMAGED)
    for index in range(400):
        fit.add((0.95, 0.05) if index < 100 else (0.55, 0.45), 0 if index < 50 else None)
    report = fit.report(fit.batch_map([0.5, 0.5]))
    [before] = [each for each in report["before"]["by_threshold"] if each["threshold"] == 0.9]
    assert (before["num_rows"], before["share"]) == (50, 0.25)
    text = "\n".join(report_lines(report))
    assert "measured on 50 of 50 gold rows; shares are of all 400 rows" in text
    assert "accept 25% of all rows at 100% accuracy" in text


def test_a_report_without_gold_rows_says_only_what_was_fitted() -> None:
    """Batch calibration needs no gold rows, so its accuracy may be unknown."""
    fit = _fit(num_gold=0)
    fitted = fit.batch_map([0.5, 0.5])
    assert [*report_lines(fit.report(fitted))] == ["damaged: batch calibration fitted on 40 rows"]
