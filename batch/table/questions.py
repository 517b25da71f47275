"""Questions of a table: in their short form, as entries of a recipe, and in a decision's body."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tidemill.protocol.decisions.questions import (
    MAX_OPTIONS,
    MAX_ORDERS,
    MAX_QUESTIONS,
    MAX_READS,
    MAX_SHOWN_OPTIONS,
    Kind,
    Layout,
)

from .errors import RecipeError

TABLE_LAYOUT: Final[Layout] = "questions_first"
"""Layout of a table's prompts unless its recipe names another one."""

LAYOUTS: Final[tuple[Layout, ...]] = ("row_first", "questions_first")
RESULT_NAMES: Final = ("usage", "error")
"""Result columns of all recipes with questions."""

CALIBRATED: Final = "calibrated"
"""Column that says whether the probabilities of a row are calibrated."""

_PROBABILITIES: Final = "_probabilities"
_RAW: Final = f"_raw{_PROBABILITIES}"
_LABEL: Final = "label"
_LABEL_INSTRUCTIONS: Final = "Which label fits the input?"
_KEYS: Final = ("name", "type", "instructions", "choices", "levels")
_OPTION_KEYS: Final[Mapping[str, str]] = {"choices": "value", "levels": "label"}
_FIELDS: Final[Mapping[Kind, Literal["choices", "levels"] | None]] = {
    "predicate": None,
    "choice": "choices",
    "score": "levels",
}
_FORMS: Final = (
    "'damaged: Is an item damaged?', 'team = billing|shipping: Which team?' or "
    "'tone = calm<angry: How upset?'"
)
_NAMED: Final = re.compile(r"([a-z]\w*)\s+(?=[A-Z])")
_TEMPLATE: Final = re.compile(r"\{\{|\{%")
_MAX_SHOWN_CHARS: Final = 60


Probabilities = tuple[float, ...]
"""Probabilities of a question's options, in their order."""


@dataclass(frozen=True, slots=True)
class TableOption:
    """One choice or level; its text names its probability in the output."""

    value: str | bool
    description: str | None = None

    @property
    def text(self) -> str:
        """Return the value as text."""
        return self.value if isinstance(self.value, str) else str(self.value).lower()


@dataclass(frozen=True, slots=True)
class TableQuestion:
    """A question about each row; its name is the column of the answer.

    A predicate has the options true and false. The last column of a calibrated question has its
    uncalibrated probabilities.
    """

    name: str
    kind: Kind
    instructions: str
    options: tuple[TableOption, ...]
    is_calibrated: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of its columns, the answer first."""
        return _columns_of(
            self.name, has_score=self.kind == "score", is_calibrated=self.is_calibrated
        )

    @property
    def body(self) -> dict[str, Any]:
        """Return the question in the body of a decision."""
        body = {"type": self.kind, "name": self.name, "instructions": self.instructions}
        field = _FIELDS[self.kind]
        if field is None:
            return body
        key = _OPTION_KEYS[field]
        return {
            **body,
            field: [
                {key: option.value}
                | ({} if option.description is None else {"description": option.description})
                for option in self.options
            ],
        }


def questions_of(keys: Mapping[str, Any]) -> tuple[TableQuestion, ...]:
    """Return the questions of a recipe: `ask`, `questions` and `labels`; raises RecipeError."""
    questions = (
        *map(_short_question, _list_of(keys, "ask", "'damaged: Is an item damaged?'")),
        *(
            _entry(number, entry)
            for number, entry in enumerate(_list_of(keys, "questions", "{name = 'damaged', …}"), 1)
        ),
        *_label_question(keys),
    )
    if len(questions) > MAX_QUESTIONS:
        raise RecipeError(
            f"it has {len(questions):,} questions, but a row may have {MAX_QUESTIONS} at most"
        )
    check_question_columns(questions)
    return questions


def question_columns_at_end(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the columns of each question whose columns are at the end of a table's.

    If they are calibrated, the columns of the last question include `CALIBRATED`.
    """
    questions: list[tuple[str, ...]] = []
    is_calibrated = names[-1:] == [CALIBRATED]
    end = len(names) - is_calibrated
    while end:
        ending = _RAW if is_calibrated else _PROBABILITIES
        name = names[end - 1].removesuffix(ending)
        forms = (
            _columns_of(name, has_score=has_score, is_calibrated=is_calibrated)
            for has_score in (False, True)
        )
        found = next(
            (form for form in forms if (*names[max(0, end - len(form)) : end],) == form), None
        )
        if found is None:
            break
        questions.insert(0, found)
        end -= len(found)
    if questions and is_calibrated:
        questions[-1] = (*questions[-1], CALIBRATED)
    return questions


def probabilities_of(question: TableQuestion, answer: Mapping[str, Any]) -> Probabilities | None:
    """Return the probabilities in an answer of a decision's body; None for a refusal."""
    if answer.get("type") == "refusal":
        return None
    if question.kind == "predicate":
        return answer["probability"], 1 - answer["probability"]
    return tuple(each["probability"] for each in answer["probabilities"])


def checked_layout(keys: Mapping[str, Any]) -> Layout:
    """Return the layout of the prompts; raises RecipeError for an unknown one."""
    layout: Layout = keys.get("question_layout") or TABLE_LAYOUT
    if layout not in LAYOUTS:
        raise RecipeError(
            f"`question_layout` is {layout!r}: it must be one of {', '.join(LAYOUTS)}"
        )
    return layout


def checked_permutations(keys: Mapping[str, Any], questions: Sequence[TableQuestion]) -> int:
    """Return the number of orders of the options; raises RecipeError for an invalid one."""
    number = keys.get("permutations", 1)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_ORDERS:
        raise RecipeError(
            f"`permutations` is {number!r}: it must be a whole number from 1 to {MAX_ORDERS}"
        )
    num_options = sum(len(question.options) for question in questions)
    counts = {
        "reads": (len(questions) * number, MAX_READS),
        "options in all reads": (num_options * number, MAX_SHOWN_OPTIONS),
    }
    for counted, (count, limit) in counts.items():
        if count > limit:
            raise RecipeError(
                f"`permutations` is {number}, so that a row has {count:,} {counted}; the maximum "
                f"is {limit:,}: reduce it, or ask fewer questions"
            )
    return number


def _columns_of(name: str, *, has_score: bool, is_calibrated: bool) -> tuple[str, ...]:
    score = (f"{name}_score",) if has_score else ()
    raw = (f"{name}{_RAW}",) if is_calibrated else ()
    return (name, *score, f"{name}_confidence", f"{name}{_PROBABILITIES}", *raw)


def _list_of(keys: Mapping[str, Any], name: str, example: str) -> Sequence[Any]:
    value = keys.get(name)
    if value is None:
        return ()
    if isinstance(value, str) and name == "ask":
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise RecipeError(f"`{name}` must be a list, such as {name} = [{example}]")
    if not value:
        raise RecipeError(f"`{name}` is empty: remove it, or write {name} = [{example}]")
    return value


def _short_question(text: Any) -> TableQuestion:
    """Return a question in its short form: `NAME: …`, `NAME = a|b: …` or `NAME = a<b: …`."""
    if not isinstance(text, str):
        raise RecipeError(f"`ask` must be a list of texts, such as {_FORMS}")
    if not text.strip():
        raise RecipeError(f"`ask` has an empty question: write one, such as {_FORMS}")
    place = f"the question {_shown(text)}"
    head, colon, instructions = text.partition(":")
    if not colon:
        raise RecipeError(f"{place} has no colon: {_colon_advice(text)}")
    name, equals, options = (part.strip() for part in head.partition("="))
    instructions = instructions.strip()
    if not name:
        advice = f"answer{f' = {options}' if equals else ''}: {instructions}"
        raise RecipeError(f"{place} has no name: write {advice!r}")
    if not equals:
        if mark := next((mark for mark in "|<" if mark in name), None):
            kind = "choices" if mark == "|" else "levels"
            first, _, rest = name.partition(" ")
            advice = f"{first} = {rest or 'a|b'}: {instructions}"
            raise RecipeError(f"{place} has {kind} without `=` before them: write {advice!r}")
        return _question(place, name, "predicate", instructions, ())
    kind = _kind_of(place, name, options, instructions)
    mark = "|" if kind == "choice" else "<"
    found = tuple(TableOption(option.strip()) for option in options.split(mark))
    return _question(place, name, kind, instructions, found)


def _colon_advice(text: str) -> str:
    if "=" in text:
        return f"put one between the options and the question, as in {_FORMS}"
    named = _NAMED.match(text)
    advice = f"answer: {text}" if named is None else f"{named[1]}: {text[named.end() :]}"
    return f"write {advice!r}"


def _kind_of(place: str, name: str, options: str, instructions: str) -> Kind:
    """Return the kind of a question with options; raises RecipeError without a separator."""
    if "|" in options and "<" in options:
        raise RecipeError(
            f"{place} mixes `|` and `<`: separate choices with `|`, and levels, the lowest first, "
            "with `<`. Options that contain these signs need `[[questions]]` in a recipe file"
        )
    if "<" in options:
        return "score"
    if "|" not in options:
        separator = next((mark for mark in "/;," if mark in options), None)
        if separator is not None:
            advice = "|".join(part.strip() for part in options.split(separator))
            advice = f"{name} = {advice}: {instructions}"
            raise RecipeError(f"{place} has one option: to separate several, write {advice!r}")
        advice = f"{name} = {options or 'yes'}|other: {instructions}"
        raise RecipeError(
            f"{place} has {'one option' if options else 'no options after `=`'}, but needs two or "
            f"more: write {advice!r}, or omit `=` and the option to ask for yes or no"
        )
    return "choice"


def _entry(number: int, entry: Any) -> TableQuestion:
    """Return a question of `questions`, whose type follows from its options, or in short form."""
    if isinstance(entry, str):
        return _short_question(entry)
    place = f"`questions` {number}"
    if not isinstance(entry, Mapping):
        raise RecipeError(f"{place} must be a table with `name` and `instructions`")
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip():
        raise RecipeError(f"{place} has no name: add one, such as name = 'damaged'")
    place = f"the question `{name[:_MAX_SHOWN_CHARS]}`"
    for key in entry:
        if key not in _KEYS:
            raise RecipeError(
                f"{place} has `{key}`, which is not a key of a question: use {', '.join(_KEYS)}"
            )
    given = [field for field in _OPTION_KEYS if field in entry]
    kind: Kind = "predicate" if not given else "choice" if given == ["choices"] else "score"
    requested = entry.get("type", kind)
    if requested not in _FIELDS:
        raise RecipeError(f"{place} has type {requested!r}: use {', '.join(_FIELDS)}")
    if len(given) > 1 or requested != kind:
        needed = _FIELDS[requested]
        raise RecipeError(
            f"{place} has type {requested} and {' and '.join(map('`{}`'.format, given)) or 'none'} "
            f"of {', '.join(map('`{}`'.format, _OPTION_KEYS))}: it must have "
            f"{'none of them' if needed is None else f'only `{needed}`'}"
        )
    if given and not isinstance(entry[given[0]], (list, tuple)):
        raise RecipeError(f"{place} must have a list in `{given[0]}`, such as ['low', 'high']")
    options = tuple(_option(place, given[0], each) for each in entry[given[0]]) if given else ()
    return _question(place, name.strip(), kind, entry.get("instructions"), options)


def _option(place: str, field: str, given: Any) -> TableOption:
    key = _OPTION_KEYS[field]
    entry = given if isinstance(given, Mapping) else {key: given}
    value, description = entry.get(key), entry.get("description")
    is_described = description is None or isinstance(description, str)
    if (
        not (isinstance(value, str) or (isinstance(value, bool) and field == "choices"))
        or not is_described
        or entry.keys() - {key, "description"}
    ):
        raise RecipeError(
            f"{place} has {_shown(given)} in `{field}`: each must be a text"
            f"{' or a boolean' * (field == 'choices')}, or {{{key} = '…', description = '…'}}"
        )
    return TableOption(value, description)


def _label_question(keys: Mapping[str, Any]) -> Iterator[TableQuestion]:
    if keys.get("labels") is not None:
        labels = _list_of(keys, "labels", "'billing', 'shipping'")
        options = tuple(_option("`labels`", "choices", label) for label in labels)
        yield _question("`labels`", _LABEL, "choice", _LABEL_INSTRUCTIONS, options)


def _question(
    place: str, name: str, kind: Kind, instructions: Any, options: tuple[TableOption, ...]
) -> TableQuestion:
    """Return a question; raises RecipeError for missing instructions or unsuitable options."""
    if not isinstance(instructions, str) or not instructions.strip():
        raise RecipeError(f"{place} has no instructions: write the question, such as {_FORMS}")
    if _TEMPLATE.search(instructions):
        raise RecipeError(
            f"{place} contains a template, but all rows have the same questions: insert columns "
            "into `prompt`"
        )
    if kind == "predicate":
        return TableQuestion(
            name, kind, instructions, (TableOption(value=True), TableOption(value=False))
        )
    field = _FIELDS[kind]
    if not 2 <= len(options) <= MAX_OPTIONS:
        counted = str(field).removesuffix("s") if len(options) == 1 else field
        raise RecipeError(
            f"{place} has {len(options):,} {counted}: it must have from 2 to {MAX_OPTIONS}"
        )
    seen: dict[str, TableOption] = {}
    for option in options:
        if not option.text.strip():
            raise RecipeError(f"{place} has an empty text in its {field}: remove or name it")
        same = seen.setdefault(option.text, option)
        if same is not option:
            is_mixed = same.value != option.value
            what = "both as a text and as a boolean" if is_mixed else "twice"
            raise RecipeError(
                f"{place} has {_shown(option.text)} {what} in its {field}: remove or rename one"
            )
    return TableQuestion(name, kind, instructions, options)


def check_question_columns(questions: Sequence[TableQuestion]) -> None:
    """Raise RecipeError for questions that need the same column, or one of the other results."""
    owners: dict[str, str] = {}
    for question in questions:
        for column in question.columns:
            if column in RESULT_NAMES:
                raise RecipeError(
                    f"the question `{column}` has the name of a result column: rename it"
                )
            other = owners.setdefault(column, question.name)
            if other != question.name:
                raise RecipeError(
                    f"the questions `{other}` and `{question.name}` both need a column `{column}`: "
                    "rename one"
                )
    names = [question.name for question in questions]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise RecipeError(f"two questions are named `{twice}`: rename one")


def check_free_columns(questions: Sequence[TableQuestion], kept: Collection[str]) -> None:
    """Raise RecipeError for a question whose columns have the name of a kept one."""
    for question in questions:
        for name in question.columns:
            if name in kept:
                raise RecipeError(
                    f"the question `{question.name}` needs a column `{name}`, which the table "
                    "already has: rename the question, or list the columns to keep without it "
                    "in `keep`"
                )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
