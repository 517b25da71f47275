"""Calibrated rows: rows of decision requests whose probabilities are calibrated, without the model.

A calibrated answer also has its `raw_probabilities`, in the order of its options, so that rows can
be calibrated any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json, to_json

from tidemill.batch.calibration.answers import CalibrationError, Options
from tidemill.batch.calibration.calibration import Calibration, QuestionFit
from tidemill.batch.calibration.probability_maps import Probabilities
from tidemill.batch.file.rows import escape_separators
from tidemill.batch.table.calibration_plan import (
    CalibrationPlan,
    calibration_of,
    checked_method,
    plan_of,
)
from tidemill.batch.table.errors import RecipeError
from tidemill.protocol.decisions.questions import mean_level, winner_of

from ..console.errors import BadInput, Refused
from ..extras import require_extras
from .calibration_file import saved_calibration
from .gold_file import gold_path, read_gold
from .new_file import open_new_file

CUSTOM_ID: Final = "custom_id"
_RAW: Final = "raw_probabilities"
_HEAD_BYTES: Final = 2**26


def is_rows_file(path: Path) -> bool:
    """Return whether a file has rows of requests, by its first line."""
    with path.open("rb") as file:
        head = file.readline(_HEAD_BYTES)
    try:
        row = from_json(head)
    except ValueError:
        return False
    return isinstance(row, dict) and {CUSTOM_ID, "response", "error"} <= row.keys()


def calibrate_rows(
    source: Path,
    target: Path,
    keys: Mapping[str, Any],
    saved: Calibration | None,
    id_column: str | None,
) -> Calibration:
    """Calibrate a file of rows, and replace `target` when it is complete; return the calibration.

    Raises BadInput for rows without decisions, and Refused for unsuitable keys.
    """
    questions = questions_of_rows(_read(source), str(source))
    plan = plan_of_rows(str(source), questions, keys, saved, id_column)
    fits = {name: QuestionFit(options) for name, options in questions.items()}
    if plan.saved is None or plan.gold_file is not None:
        for row in _read(source):
            add_row(fits, row, gold_of_rows(plan, row))
    calibration = calibration_of(plan, [*fits.values()])
    try:
        calibration.check_fitted()
    except CalibrationError as exc:
        raise BadInput(f"{source} cannot be calibrated: {exc}") from exc
    with open_new_file(str(target)) as new:
        for row in _read(source):
            for answer in _answers_of(row):
                found = calibration.of(answer.name)
                answer.replace(None if found is None else found.map(answer.raw))
            new.write(escape_separators(to_json(row, inf_nan_mode="null")) + b"\n")
    return calibration


def add_row(
    fits: Mapping[str, QuestionFit], row: Mapping[str, Any], gold: Mapping[str, int]
) -> None:
    """Add the answers of a row to the fits of their questions, with the known correct answers."""
    answers = {answer.name: answer.raw for answer in _answers_of(row)}
    for name, fit in fits.items():
        fit.add(answers.get(name), gold.get(name))


def check_keys(keys: Mapping[str, Any], saved: Calibration | None) -> None:
    """Raise Refused before a run for keys that cannot calibrate rows of requests."""
    path = gold_path(keys)
    if path is not None:
        require_extras("--gold FILE", "tables")
    if keys.get("gold") and path is None:
        given = keys["gold"]
        name = given[0] if isinstance(given, list) and len(given) == 1 else given
        raise Refused(
            f"--gold {name} is not a file: rows of requests have no columns, so pass a table with "
            f"`{CUSTOM_ID}` and a column of correct answers for each question"
        )
    try:
        checked_method(keys, has_gold=path is not None, is_saved=saved is not None)
    except RecipeError as exc:
        raise Refused(f"the calibration is not valid: {exc}") from exc


def gold_of_rows(plan: CalibrationPlan, row: Mapping[str, Any]) -> dict[str, int]:
    """Return the known correct answers of a row by question."""
    answers = {} if plan.gold_file is None else plan.gold_file.answers
    custom_id = str(row.get(CUSTOM_ID))
    return {name: known[custom_id] for name, known in answers.items() if custom_id in known}


def plan_of_rows(
    source: str,
    questions: Mapping[str, Options],
    keys: Mapping[str, Any],
    saved: Calibration | None = None,
    id_column: str | None = None,
) -> CalibrationPlan:
    """Return the plan of rows of requests; raises Refused and BadInput for unsuitable keys."""
    saved = saved or saved_calibration(keys)
    check_keys(keys, saved)
    options, path = [*questions.values()], gold_path(keys)
    gold = None
    if path is not None:
        gold = read_gold(path, id_column or CUSTOM_ID, options)
    try:
        return plan_of(keys, options, saved, gold)
    except RecipeError as exc:
        raise Refused(f"{source} cannot be calibrated: {exc}") from exc


def questions_of_rows(rows: Iterable[Mapping[str, Any]], source: str) -> dict[str, Options]:
    """Return the questions of all rows; raises BadInput without any, or for one with two forms."""
    questions: dict[str, Options] = {}
    for number, row in enumerate(rows, 1):
        for answer in _answers_of(row):
            known = questions.setdefault(answer.name, answer.options)
            if known != answer.options:
                raise BadInput(
                    f"{source} cannot be calibrated: `{answer.name}` has the options "
                    f"{_shown(answer.options)} in row {number:,} and {_shown(known)} before it, so "
                    "calibrate these rows in separate files"
                )
    if not questions:
        raise BadInput(
            f"{source} has no decision: pass the rows of /v1/decisions or /v1/systemone, or the "
            "output of a run with --ask"
        )
    return questions


def _shown(options: Options) -> str:
    text = ", ".join(options.texts)
    return f"({text[:60]}{'…' * (len(text) > 60)})"


def _read(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; raises BadInput for another line."""
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = from_json(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise BadInput(f"{source} cannot be calibrated: line {number:,} is not a row")
            yield row


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to one question in a row, which `replace` changes.

    A question without a name is called by its place: `1`, `2` and so on.
    """

    name: str
    options: Options
    raw: Probabilities
    _label_mass: float
    _body: dict[str, Any]

    def replace(self, shares: Probabilities | None) -> None:
        """Set the probabilities, and all that follows from them; None restores the raw ones."""
        body = self._body
        body.pop(_RAW, None)
        raw, shares = self.raw, self.raw if shares is None else shares
        winner = winner_of(shares)
        for name in {"noul", "probability"} & body.keys():
            body[name] = shares[0]
        match body.get("probabilities"):
            case list(listed):
                for each, share in zip(listed, shares, strict=True):
                    each["probability"] = share
                if "choice" in body:
                    body["choice"] = listed[winner]["value"]
            case dict(named):
                body["probabilities"] = dict(zip(named, shares, strict=True))
                if "choice" in body:
                    body["choice"] = [*named][winner]
        if "confidence" in body:  # of /v1/systemone: also times the mass of the labels
            body["confidence"] = shares[winner] * self._label_mass
        if "score" in body:
            body["score"] = mean_level(shares)
        if shares is not raw:
            body[_RAW] = [*raw]


def _answers_of(row: Mapping[str, Any]) -> Iterator[_Answer]:
    """Yield the answers of a successful row of /v1/decisions or /v1/systemone."""
    response = row.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    answers = body.get("answers") if isinstance(body, dict) else None
    diagnostics = body.get("diagnostics") if isinstance(body, dict) else None
    if isinstance(answers, list):
        diagnostics = None
        named = [
            (each.get("name") or str(place), each)
            for place, each in enumerate(answers, 1)
            if isinstance(each, dict)
        ]
    elif isinstance(answers, dict):
        named = [*answers.items()]
    else:
        return
    for name, answer in named:
        try:
            found = _parsed(name, answer, diagnostics)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            found = None  # a refusal, or the answer of another server
        if found is not None:
            yield found


def _parsed(name: str, answer: dict[str, Any], diagnostics: Any) -> _Answer | None:
    kind = answer["type"]
    shares: list[float]
    if kind in {"predicate", "noul"}:
        options = Options(name, "predicate", ("true", "false"))
        yes = answer["probability" if kind == "predicate" else "noul"]
        shares = [yes, 1 - yes]
    elif isinstance(listed := answer["probabilities"], list):
        key = "label" if kind == "score" else "value"
        options = Options(name, kind, tuple(_text(each[key]) for each in listed))
        shares = [each["probability"] for each in listed]
    else:
        texts = [answer["legend"][level] for level in listed] if kind == "score" else [*listed]
        options, shares = Options(name, kind, tuple(texts)), [*listed.values()]
    raw = tuple(map(float, answer.get(_RAW, shares)))
    if len(raw) != len(shares):
        raise ValueError("raw probabilities of other options")
    mass = 1.0 if diagnostics is None else float(diagnostics[name].get("label_mass", 1.0))
    return _Answer(name, options, raw, mass, answer)


def _text(value: str | bool) -> str:  # noqa: FBT001 - a choice may be a boolean
    return value if isinstance(value, str) else str(value).lower()
