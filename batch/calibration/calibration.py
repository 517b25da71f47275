"""Calibration of a model's decisions: a map for each question, valid for the same settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, Self, TypeVar, get_args

from tidemill.protocol.decisions.questions import Kind

from .accuracy import Accuracy
from .answers import CalibrationError, Options
from .fit import Fit, LogMeans, cross_validated, fit_isotonic, fit_platt
from .probability_maps import Probabilities, ProbabilityMap, parse_map
from .report import FEW_GOLD_ROWS, MIN_GOLD_ROWS, report_lines

MAX_ROWS: Final = 10_000
"""Rows that are held in memory per question; of more, every second, fourth … is used."""

T = TypeVar("T")

Method = Literal["batch", "platt", "isotonic"]
FITS: Final[Mapping[str, Fit]] = {"platt": fit_platt, "isotonic": fit_isotonic}

_ADVICE: Final = "pass the .calibration.json of a calibrated output"
_OBJECT: Final = "decision.calibration"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class QuestionMap:
    """A question's map, the method of its fit, and the number of rows that it was fitted on."""

    options: Options
    method: Method
    map: ProbabilityMap
    num_rows: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Maps of the questions of a run, and their accuracy on gold rows as `QuestionFit.report`.

    `settings` identify the model and the prompts: a calibration is valid only for equal ones.
    """

    settings: Mapping[str, Any]
    questions: tuple[QuestionMap, ...]
    report: tuple[Mapping[str, Any], ...] = ()

    def check_questions(self, questions: Sequence[Options]) -> None:
        """Raise CalibrationError for a question that has no map, or other options there."""
        known = {each.options.name: each.options for each in self.questions}
        for question in questions:
            if question.name not in known:
                raise CalibrationError(
                    f"the calibration has no question `{question.name}`, only "
                    f"{', '.join(known) or 'none'}: fit a new one"
                )
            if known[question.name] != question:
                raise CalibrationError(
                    f"`{question.name}` has other options in the calibration "
                    f"({', '.join(known[question.name].texts)}): fit a new one"
                )

    def check_fitted(self) -> None:
        """Raise CalibrationError if no question has a map."""
        if not self.questions:
            raise CalibrationError("; ".join(each["problem"] for each in self.report))

    @property
    def is_complete(self) -> bool:
        """Return whether every question has a map."""
        return not any("problem" in each for each in self.report)

    @property
    def reports(self) -> dict[str, Mapping[str, Any]]:
        """Return the report of each question by name."""
        return {each["name"]: each for each in self.report}

    def report_lines(self) -> Iterator[str]:
        """Yield the lines of all reports."""
        for report in self.report:
            yield from report_lines(report)

    def of(self, name: str) -> QuestionMap | None:
        """Return the map of a question; None without one."""
        return next((each for each in self.questions if each.options.name == name), None)

    def print(self) -> str:
        """Return the calibration as a JSON document with its report."""
        value = {**self.as_json(), "report": [*self.report]}
        return json.dumps(value, ensure_ascii=False, indent=2) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Return the calibration without its report, as a value of JSON."""
        return {
            "object": _OBJECT,
            "version": _VERSION,
            "settings": self.settings,
            "questions": [
                {
                    "name": each.options.name,
                    "kind": each.options.kind,
                    "options": [*each.options.texts],
                    "method": each.method,
                    "rows": each.num_rows,
                    "map": each.map.as_json(),
                }
                for each in self.questions
            ],
        }

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Return the calibration of a JSON document; raises CalibrationError for another one."""
        if not text.strip():
            raise CalibrationError(f"it is empty: {_ADVICE}")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise CalibrationError(f"it is not a complete JSON document: {_ADVICE}") from exc
        return cls.of_json(value)

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Return the calibration of a value of JSON; raises CalibrationError for another one."""
        if not isinstance(value, Mapping) or (value.get("object"), value.get("version")) != (
            _OBJECT,
            _VERSION,
        ):
            raise CalibrationError(f"it is not a calibration of decisions: {_ADVICE}")
        try:
            found = cls(
                dict(value["settings"]),
                tuple(map(_question_map, value["questions"])),
                tuple(value.get("report", ())),
            )
            [*found.report_lines()]
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CalibrationError(
                "it is a damaged calibration of decisions: fit a new one"
            ) from exc
        return found


def _question_map(value: Mapping[str, Any]) -> QuestionMap:
    options = Options(value["name"], value["kind"], tuple(value["options"]))
    texts = (options.name, *options.texts)
    if value["method"] not in {"batch", *FITS} or options.kind not in get_args(Kind):
        raise ValueError("an unknown method or kind")
    if not all(isinstance(text, str) for text in texts) or not isinstance(value["rows"], int):
        raise ValueError("an option that is not a text, or a count that is not a number")
    found = parse_map(value["map"], len(options.texts))
    return QuestionMap(options, value["method"], found, value["rows"])


class SampledRows(Generic[T]):
    """Rows in bounded memory, evenly spread.

    If there are more than `MAX_ROWS`, every second of them is dropped, as often as needed.
    """

    def __init__(self, most: int = MAX_ROWS) -> None:
        self.rows: list[T] = []
        self.num_rows = 0
        self._most = most
        self._stride = 1

    def add(self, row: T) -> None:
        """Add a row."""
        if self.num_rows % self._stride == 0:
            self.rows.append(row)
            if len(self.rows) > self._most:
                self.rows = self.rows[::2]
                self._stride *= 2
        self.num_rows += 1


class QuestionFit:
    """The rows of one question, from which its map is fitted and its accuracy measured."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.means = LogMeans(len(options.texts))
        self.gold = SampledRows[tuple[Probabilities, int]]()
        self.num_known = 0
        """Number of gold answers that belong to a row, with or without an answer."""
        self._sample = SampledRows[Probabilities]()

    def add(self, probabilities: Probabilities | None, gold: int | None) -> None:
        """Add a row with its gold option, if it has one; a failed row has no probabilities."""
        self.num_known += gold is not None
        if probabilities is None:
            return
        self.means.add(probabilities)
        self._sample.add(probabilities)
        if gold is not None:
            self.gold.add((probabilities, gold))

    def batch_map(self, prior: Sequence[float]) -> QuestionMap:
        """Return batch calibration with a prior; raises CalibrationError without rows."""
        if not self.means.num_rows:
            raise CalibrationError(f"`{self.options.name}` was answered in no row")
        found = self.means.batch_map(prior)
        return QuestionMap(self.options, "batch", found, self.means.num_rows)

    def gold_map(self, method: Literal["platt", "isotonic"]) -> QuestionMap:
        """Return the map fitted on gold rows; raises CalibrationError if there are too few."""
        self._check_gold()
        found = FITS[method](*self._gold_rows())
        return QuestionMap(self.options, method, found, len(self.gold.rows))

    def report(self, fitted: QuestionMap, *, is_saved: bool = False) -> dict[str, Any]:
        """Return the accuracy on gold rows before and after, as a value of JSON.

        A map that was fitted on these rows is fitted again without each fifth of them, and
        measured on that fifth. A saved map is measured as it is.
        """
        rows, gold = self._gold_rows()
        value: dict[str, Any] = {
            "name": self.options.name,
            "method": fitted.method,
            "fitted_rows": fitted.num_rows,
            "rows": self._sample.num_rows,
            "gold_rows": self.gold.num_rows,
            "measured_rows": len(rows),
        }
        if len(rows) < MIN_GOLD_ROWS:
            return value
        fit = None if is_saved else FITS.get(fitted.method)
        if fit is None:
            after = [fitted.map(row) for row in rows]
        else:
            after = cross_validated(fit, rows, gold)
        return {
            **value,
            "before": Accuracy.measure(rows, gold, self._sample.rows).as_json(),
            "after": Accuracy.measure(
                after, gold, [fitted.map(row) for row in self._sample.rows]
            ).as_json(),
        }

    def _gold_rows(self) -> tuple[list[Probabilities], list[int]]:
        return [row for row, _ in self.gold.rows], [gold for _, gold in self.gold.rows]

    def _check_gold(self) -> None:
        if (count := len(self.gold.rows)) < MIN_GOLD_ROWS:
            raise CalibrationError(
                f"`{self.options.name}` has {count} rows with a gold answer: at least "
                f"{MIN_GOLD_ROWS} are required, {FEW_GOLD_ROWS} advised"
            )
