"""Calibration plan: the keys of a recipe that calibrate the answers of its questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..calibration.answers import CalibrationError, Options, priors_of
from ..calibration.calibration import Calibration, Method, QuestionFit, QuestionMap
from .errors import RecipeError
from .questions import TableQuestion
from .recipe_keys import CALIBRATION


@dataclass(frozen=True, slots=True)
class GoldAnswers:
    """Correct answers from a separate file: options by question and by the row's custom ID."""

    id_column: str
    answers: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """How the answers of a table are calibrated: by a `saved` calibration, or one fitted on it.

    `priors` has the probabilities of the options by question, `gold` the columns of the correct
    answers, unless they are in a `gold_file`; these also measure the accuracy of other methods.
    """

    method: Method | Literal["saved"]
    priors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    gold: Mapping[str, str] = field(default_factory=dict)
    saved: Calibration | None = None
    gold_file: GoldAnswers | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that gold answers need."""
        ids = () if self.gold_file is None else (self.gold_file.id_column,)
        return tuple(dict.fromkeys((*self.gold.values(), *ids)))

    def has_gold(self, question: str) -> bool:
        """Return whether a question has gold answers."""
        return question in (self.gold if self.gold_file is None else self.gold_file.answers)


def calibration_of(plan: CalibrationPlan, fits: Sequence[QuestionFit]) -> Calibration:
    """Return the calibration of a plan from the rows of each question, with a report.

    A question with too few rows has no map.
    """
    maps: list[QuestionMap] = []
    report: list[Mapping[str, Any]] = []
    for fit in fits:
        name = fit.options.name
        try:
            found, problem = _map_of(plan, fit), ""
        except CalibrationError as exc:
            found, problem = None, str(exc)
        unknown = 0
        if plan.gold_file is not None:
            unknown = len(plan.gold_file.answers.get(name, ())) - fit.num_known
        if found is None:
            report.append({"name": name, "problem": problem, "unknown_gold": unknown})
            continue
        maps.append(found)
        each = fit.report(found, is_saved=plan.saved is not None)
        report.append({**each, "unknown_gold": unknown})
    return Calibration({}, tuple(maps), tuple(report))


def _map_of(plan: CalibrationPlan, fit: QuestionFit) -> QuestionMap | None:
    name = fit.options.name
    match plan.method:
        case "batch":
            return fit.batch_map(plan.priors[name])
        case "platt" | "isotonic":
            if not plan.has_gold(name):
                raise CalibrationError("it has no gold answers")
            return fit.gold_map(plan.method)
        case _:
            assert plan.saved is not None
            return plan.saved.of(name)


def options_of(question: TableQuestion) -> Options:
    """Return the options of a question as a calibration names them."""
    return Options(question.name, question.kind, tuple(each.text for each in question.options))


def plan_of(
    keys: Mapping[str, Any],
    questions: Sequence[Options],
    saved: Calibration | None = None,
    gold_file: GoldAnswers | None = None,
) -> CalibrationPlan:
    """Return the plan of the keys of a calibration; raises RecipeError.

    `saved` is the content of the file that the key `calibration` names.
    """
    if not questions:
        name = next((name for name in CALIBRATION if name in keys), CALIBRATION[-1])
        raise RecipeError(f"`{name}` needs questions: add `ask`, or omit it")
    saved = saved or _saved(keys)
    gold = {} if gold_file is not None else _gold_columns(keys.get("gold"), questions)
    has_gold = bool(gold) or gold_file is not None
    method = checked_method(keys, has_gold=has_gold, is_saved=saved is not None)
    try:
        if saved is not None:
            saved.check_questions(questions)
        priors = priors_of(_priors(keys.get("prior")), questions) if method == "batch" else {}
    except CalibrationError as exc:
        raise RecipeError(str(exc)) from exc
    return CalibrationPlan(method, priors, gold, saved, gold_file)


def check_prompts(saved: Calibration, here: Mapping[str, Any]) -> None:
    """Raise RecipeError if a calibration belongs to other questions or prompts than these settings.

    One without settings is not compared.
    """
    if not saved.settings:
        return
    there = {"--permutations": 1, **saved.settings}
    odd = next((flag for flag, value in here.items() if there.get(flag) != value), None)
    if odd is not None:
        raise RecipeError(
            f"`calibration` was fitted with another `{odd[2:].replace('-', '_')}`: use the same "
            "questions and prompt, or fit a new one"
        )


def _saved(keys: Mapping[str, Any]) -> Calibration | None:
    """Return the calibration inside a recipe."""
    given = keys.get("calibration")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RecipeError(
            f"`calibration` is {given!r}: it must be the name of a .calibration.json file next to "
            "the table, or the content of one"
        )
    try:
        return Calibration.of_json(given)
    except CalibrationError as exc:
        raise RecipeError(f"`calibration` cannot be used: {exc}") from exc


def checked_method(keys: Mapping[str, Any], *, has_gold: bool, is_saved: bool) -> Any:
    """Return the method of a plan; raises RecipeError for keys that do not fit together."""
    method = keys.get("calibrate")
    if method is not None and method not in get_args(Method):
        raise RecipeError(
            f"`calibrate` is {method!r}: it must be one of {', '.join(get_args(Method))}"
        )
    if is_saved:
        odd = next((name for name in ("calibrate", "prior") if name in keys), None)
        if odd is not None:
            raise RecipeError(f"a saved calibration cannot be combined with `{odd}`: omit one")
        return "saved"
    if method is None and not has_gold:
        raise RecipeError("`prior` needs `calibrate`: add calibrate = 'batch'")
    method = method or "platt"
    if method == "batch" and "prior" not in keys:
        raise RecipeError(
            "batch calibration needs a `prior`, since it moves the answers towards it: state the "
            "expected share of each option, such as prior = '0.3', or prior = 'even'"
        )
    if method != "batch" and "prior" in keys:
        raise RecipeError(f"`prior` is used only by calibrate = 'batch', not by {method!r}")
    if method != "batch" and not has_gold:
        raise RecipeError(
            f"calibrate = {method!r} needs `gold`: name the column of the correct answers"
        )
    return method


def _gold_columns(given: Any, questions: Sequence[Options]) -> dict[str, str]:
    """Return the column of the correct answers by question."""
    if given is None:
        return {}
    names = [question.name for question in questions]
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list):
        pairs = [_pair(each, names) for each in given]
        given = dict(pairs)
        if len(given) < len(pairs):
            raise RecipeError("`gold` has two columns for one question: remove one")
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given.values()):
        raise RecipeError("`gold` must be a column, or a table such as {damaged = 'is_damaged'}")
    for name in given:
        if name not in names:
            raise RecipeError(f"`gold` has {name!r}: it must be one of {', '.join(names)}")
    return {**given}


def _pair(text: Any, names: Sequence[str]) -> tuple[str, str]:
    name, equals, column = text.partition("=") if isinstance(text, str) else ("", "", "")
    if equals and name.strip() in names:
        return name.strip(), column.strip()
    if len(names) > 1:
        raise RecipeError(
            f"`gold` is {text!r}, but there are {len(names)} questions: write QUESTION=COLUMN, "
            f"with one of {', '.join(names)}"
        )
    return names[0], str(text)


def _priors(given: Any) -> list[str]:
    found = [str(each) for each in (given if isinstance(given, list) else [given])]
    return [] if given is None else found
