"""Recipe: how to render a table's rows as requests, and its results as columns."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from difflib import get_close_matches
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from tidemill.protocol.decisions.questions import Layout
from tidemill.protocol.fetched_urls import FILE_URL
from tidemill.protocol.requests import PROMPT_FIELDS, request_types
from tidemill.protocol.responses.request import LOGPROBS
from tidemill.protocol.routes import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    ENDPOINTS,
    MODERATIONS,
    POOLING,
    RESPONSES,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    Route,
    find_route,
)

from ..escalation import EscalateBy
from ..model import MAX_PRIORITY, is_priority
from .errors import RecipeError, in_words
from .questions import (
    TABLE_LAYOUT,
    TableQuestion,
    check_question_columns,
    checked_layout,
    checked_permutations,
    questions_of,
)
from .recipe_keys import CALIBRATION, CASCADE, QUESTIONS, RECIPE_KEYS, TEMPLATES

if TYPE_CHECKING:
    from ..calibration.calibration import Calibration
    from .calibration_plan import CalibrationPlan, GoldAnswers

TableFormat = Literal["parquet", "csv", "tsv", "jsonl", "arrow"]
"""Formats of input and output tables."""

VectorType = Literal["float32", "float16", "int8"]
"""Element types of embeddings; `int8` is 127 times the value, rounded."""

MAX_DEPTH: Final = 64
"""Nesting limit of a recipe's values; a JSON schema needs two or three levels per value."""

POOLED_TASKS: Final = ("embed_sparse", "token_embed", "token_classify")
"""Values of `params.task` of `/pooling` that tables have columns for."""
_MAX_INT_BITS: Final = 64
_MAX_SUGGESTED: Final = 1_000
_MAX_NAME_CHARS: Final = 100
_LINE_NUMBER: Final = re.compile(r"at line (\d+)")
_MARK: Final = re.compile(r'"""|\'\'\'|["\'#.=,\[\]{}\n]')
_ENDS: Final = {
    '"""': re.compile(r'(?:\\.|[^\\])*?"""(?:"{0,2})', re.DOTALL),
    "'''": re.compile(r"(?:[^'].*?|)'''(?:'{0,2})", re.DOTALL),
    '"': re.compile(r'(?:\\.|[^"\\\n])*"'),
    "'": re.compile(r"[^'\n]*'"),
    "#": re.compile(r"[^\n]*"),
}
"""The ends of a TOML document's texts and comments, by their beginnings."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A table's recipe.

    `fields` are fields of the body with a Jinja template in each string, and `params` fixed fields.
    `id` is the column of custom IDs, by default the row's number; `keep` lists the columns in the
    output, by default all; `output` is its format, by default the input's. Each row is read once
    for each of `permutations` orders of a question's options.
    """

    url: str = CHAT_COMPLETIONS.name
    fields: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    keep: tuple[str, ...] | None = None
    output: TableFormat | None = None
    vectors: VectorType = "float32"
    questions: tuple[TableQuestion, ...] = ()
    question_layout: Layout = TABLE_LAYOUT
    permutations: int = 1
    calibration: CalibrationPlan | None = None
    escalate: str | None = None
    """The second model, for rows whose confidence is lower than a threshold; None without one."""
    escalate_below: float | None = None
    target_accuracy: float | None = None
    """The threshold, or the accuracy from which it is learnt."""
    escalate_by: EscalateBy = "decision"
    priority: int | None = None
    """That of the batch that a deployment makes of the table."""
    has_models: bool = False
    """Whether the output names the model of each row, because a run has two."""
    flags: frozenset[str] | None = None
    """Keys that come from flags of a command, the others from a file; None without a command."""

    @property
    def route(self) -> Route:
        """Endpoint of its requests."""
        route = find_route(self.url)
        assert route is not None  # `parse_recipe` has checked it
        return route

    @property
    def body_params(self) -> dict[str, Any]:
        """Fields of each body without a template; vectors use base64, the fastest to print."""
        params = dict(self.params)
        if self.route is EMBEDDINGS:
            params["encoding_format"] = "base64"
        if self.questions:
            params["questions"] = [question.body for question in self.questions]
            params["question_layout"] = self.question_layout
        if self.permutations > 1:
            params["debias"] = self.permutations
        return params

    @property
    def uncalibrated(self) -> Recipe:
        """Return the recipe without a calibration: its gold answers only measure the accuracy."""
        questions = tuple(replace(each, is_calibrated=False) for each in self.questions)
        return replace(self, questions=questions, calibration=None)

    @property
    def num_choices(self) -> int:
        """Number of answers to a request."""
        number = self.params.get("n")
        return number if isinstance(number, int) and self.route is not RESPONSES else 1

    @property
    def wants_logprobs(self) -> bool:
        """Return whether its requests ask for log probabilities."""
        if self.route is not RESPONSES:
            return bool(self.params.get("logprobs"))
        included = self.params.get("include")
        is_included = isinstance(included, list) and LOGPROBS in included
        return is_included or bool(self.params.get("top_logprobs"))

    @property
    def wants_spans(self) -> bool:
        """Return whether its requests state how a token classifier joins tokens."""
        return "aggregation_strategy" in {**self.params, **self.fields}

    @property
    def answer_schema(self) -> Mapping[str, Any]:
        """JSON schema that answers follow; empty without one."""
        names = ("response_format", "json_schema", "schema")
        if self.route is RESPONSES:
            names = ("text", "format", "schema")
        value: Any = self.params
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value if isinstance(value, Mapping) and self.num_choices == 1 else {}


def parse_recipe(given: Mapping[str, Any], *, may_escalate: bool = False) -> Recipe:
    """Return the recipe from a TOML document's keys; raises RecipeError for an invalid one.

    A caller that has one model may not escalate.
    """
    _check_values(given)
    _check_keys(given)
    questions = questions_of(given)
    cascade: dict[str, Any] = {}
    if not given.keys().isdisjoint(CASCADE):
        from .cascade_keys import cascade_of  # late: few recipes have a second model

        cascade = cascade_of(given, questions, may_escalate=may_escalate)
    url = _text(given, "url") or (DECISIONS if questions else CHAT_COMPLETIONS).name
    route = find_route(url)
    if route is None:
        raise RecipeError(f"`url` is {url!r}: it must be one of {', '.join(ENDPOINTS)}")
    params = given.get("params", {})
    if not isinstance(params, Mapping):
        raise RecipeError("`params` must be a table, such as params = {temperature = 0}")
    if route is EMBEDDINGS and params.get("output_dtype") is not None:
        raise RecipeError("`params.output_dtype` does not support tables: use `vectors`")
    if route is not EMBEDDINGS and given.get("vectors") is not None:
        raise RecipeError(
            f"{route.name} does not support `vectors`, the type of {EMBEDDINGS.name}: omit it"
        )
    if route is POOLING:
        _check_pooling(params)
    _check_questions(given, route, params, has_questions=bool(questions))
    if _flag(given, "confidence"):
        if route not in {CHAT_COMPLETIONS, COMPLETIONS}:
            raise RecipeError(
                f"{route.name} does not support `confidence`, which is for constrained chats and "
                "completions"
            )
        params = {**params, "confidence": True}
    recipe = Recipe(
        url,
        _fields(given, route, params),
        params,
        _text(given, "id"),
        _names(given),
        _choice(given, "output", get_args(TableFormat)),
        _choice(given, "vectors", get_args(VectorType)) or "float32",
        questions,
        checked_layout(given),
        checked_permutations(given, questions),
        priority=_priority(given),
        **cascade,
    )
    return recipe if given.keys().isdisjoint(CALIBRATION) else calibrated_recipe(recipe, given)


def calibrated_recipe(
    recipe: Recipe,
    keys: Mapping[str, Any],
    saved: Calibration | None = None,
    gold_file: GoldAnswers | None = None,
) -> Recipe:
    """Return a recipe that calibrates its answers by these keys, or a saved calibration.

    A calibration inside the recipe must have been fitted with the same questions and prompt.
    """
    from .calibration_plan import check_prompts, options_of, plan_of  # late: few recipes have one

    plan = plan_of(keys, [*map(options_of, recipe.questions)], saved, gold_file)
    if saved is None and plan.saved is not None:
        settings = {
            "--ask": [question.body for question in recipe.questions],
            "--question-layout": recipe.question_layout,
            "--permutations": recipe.permutations,
            "--prompt": keys.get("prompt"),
            "--system": keys.get("system"),
        }
        check_prompts(plan.saved, settings)
    questions = tuple(replace(question, is_calibrated=True) for question in recipe.questions)
    check_question_columns(questions)
    return replace(recipe, calibration=plan, questions=questions)


def overridden(keys: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe file's keys with others that override them, with all forms of a key."""
    replaced = {*TEMPLATES} if "prompt" in given else set()
    if not given.keys().isdisjoint(QUESTIONS):
        replaced |= {*QUESTIONS}
    if "calibration" in given:
        replaced |= {"calibrate", "prior"}
    elif "calibrate" in given:
        replaced |= {"calibration"}
    return {name: value for name, value in keys.items() if name not in replaced} | {**given}


def load_recipe(text: str) -> dict[str, Any]:
    """Return the keys of a recipe file; raises RecipeError if it is not TOML."""
    _check_dots(text)
    with in_words(RecipeError):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as exc:
            raise RecipeError(f"it is not valid TOML: {exc}{_quotes_hint(exc, text)}") from exc


def _quotes_hint(exc: tomllib.TOMLDecodeError, text: str) -> str:
    """Return how to quote a template, if the error is in a line with one."""
    line = _LINE_NUMBER.search(str(exc))
    lines = text.split("\n")
    if line is None or "{{" not in lines[int(line[1]) - 1]:
        return ""
    return ": inside a template, use single quotes, as in \"{{ row['Review text'] }}\""


def print_recipe(keys: Mapping[str, Any]) -> str:
    """Return the keys of a recipe as a TOML document."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in keys.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(
            f"{_toml(name)} = {_toml(item)}" for name, item in value.items() if item is not None
        )
        return f"{{{pairs}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # JSON and TOML write texts and numbers alike, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return `: did you mean …?` for a name that is not among the known ones."""
    found = nearest(name, known)
    return "" if found is None else f": did you mean `{found}`?"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is most like this one; None without one.

    Many or very long names are not compared, because that would take minutes.
    """
    if len(known) > _MAX_SUGGESTED or len(name) > _MAX_NAME_CHARS:
        return None
    known = [each for each in known if len(each) <= _MAX_NAME_CHARS]
    return next(iter(get_close_matches(name, known, n=1)), None)


def _check_dots(text: str) -> None:
    """Raise RecipeError for a dotted key of many parts, whose dictionaries would need gigabytes."""
    place = dots = 0
    while (found := _MARK.search(text, place)) is not None:
        mark, place = found[0], found.end()
        if mark in _ENDS:
            end = _ENDS[mark].match(text, place)
            if end is None:
                return  # not TOML, as its parser reports
            place = end.end()
        else:
            dots = dots + 1 if mark == "." else 0
        if dots > MAX_DEPTH:
            raise _too_deep()


def _check_values(keys: Mapping[str, Any]) -> None:
    """Raise RecipeError for values that are nested too deeply or have no JSON equivalent."""
    left: list[tuple[Any, int]] = [(keys, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, (Mapping, list)):
            if depth > MAX_DEPTH:
                raise _too_deep()
            inner = [*value, *value.values()] if isinstance(value, Mapping) else value
            left += [(item, depth + 1) for item in inner]
        elif isinstance(value, str):
            _check_unicode(value)
        elif isinstance(value, (date, time)):
            raise RecipeError("it contains a date or time: write it as text")
        elif isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise RecipeError(f"it contains a number of more than {_MAX_INT_BITS} bits")
        elif isinstance(value, float) and not isfinite(value):
            raise RecipeError(f"it contains {value}, which JSON does not support")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        shown = ascii(text[max(0, exc.start - _MAX_NAME_CHARS) : exc.end])
        raise RecipeError(f"it contains {shown}, which is not valid Unicode") from exc


def _too_deep() -> RecipeError:
    return RecipeError(f"it is nested more than {MAX_DEPTH} levels deep")


def _check_keys(keys: Mapping[str, Any]) -> None:
    for key in keys:
        if key not in RECIPE_KEYS:
            hint = suggestion(key, RECIPE_KEYS) or (
                "; put parameters of the request into `params`, and templates into "
                f"{', '.join(PROMPT_FIELDS)}"
            )
            raise RecipeError(f"`{key}` is not a recipe key{hint}")


def _check_pooling(params: Mapping[str, Any]) -> None:
    """Raise RecipeError unless the parameters say which column `/pooling` needs."""
    if params.get("task") not in POOLED_TASKS:
        raise RecipeError(
            f"{POOLING.name} needs `params.task` in tables: {', '.join(POOLED_TASKS)}; for a "
            f"vector or labels of each row use {EMBEDDINGS.name} or {CLASSIFY.name}"
        )
    if params.get("encoding_format") not in (None, "float"):  # which may be a list
        raise RecipeError("`params.encoding_format` does not support tables: remove it")


def _check_questions(
    keys: Mapping[str, Any], route: Route, params: Mapping[str, Any], *, has_questions: bool
) -> None:
    """Raise RecipeError for questions with keys of other requests, or their keys without any."""
    if not has_questions:
        alone = next((name for name in ("question_layout", "permutations") if name in keys), None)
        if alone is not None or route is DECISIONS:
            raise RecipeError(
                f"{DECISIONS.name if alone is None else f'`{alone}`'} needs questions: add --ask "
                "or `ask`, such as 'damaged: Is an item damaged?'"
            )
        return
    if route is not DECISIONS:
        raise RecipeError(
            f"`url` is {route.name!r}, but questions need {DECISIONS.name}: remove it"
        )
    own = {"questions": "questions", "question_layout": "question_layout", "debias": "permutations"}
    for name, key in own.items():
        if name in params:
            raise RecipeError(f"`params` has `{name}`: use the recipe's key `{key}` instead")
    for name in PROMPT_FIELDS:
        if name in keys and name not in {"prompt", "input"}:
            raise RecipeError(
                f"`{name}` cannot be used with questions: use `prompt`, which replaces it"
            )


def _fields(keys: Mapping[str, Any], route: Route, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the templates of the body, with `prompt` and `system` in the URL's own fields."""
    names = (*PROMPT_FIELDS, FILE_URL)
    fields = {name: keys[name] for name in names if name in keys and name != "prompt"}
    prompt, system = keys.get("prompt"), keys.get("system")
    if prompt is not None:
        fields |= _prompt_field(prompt, route)
    if system is not None and (route is DECISIONS or (route is RESPONSES and "input" in fields)):
        fields["instructions"] = system
    elif system is not None:
        if "messages" not in fields:
            own = "input" if route is RESPONSES else "messages"
            raise RecipeError(f"`system` needs a `prompt` or `{own}` as well")
        fields["messages"] = [{"role": "system", "content": system}, *fields["messages"]]
    both = next((name for name in TEMPLATES[1:] if name in keys), None)
    if prompt is not None and both is not None:
        raise RecipeError(f"`prompt` and `{both}` cannot be used together")
    if twice := sorted(fields.keys() & params.keys()):
        raise RecipeError(f"`{twice[0]}` is both in `params` and outside of it: remove one")
    if not fields and route is not DECISIONS:  # whose default is all columns of the row
        raise RecipeError(
            "it has no template: add a `prompt`, such as prompt = '{{ text }}', or `messages`"
        )
    return fields


def _prompt_field(prompt: Any, route: Route) -> dict[str, Any]:
    if route is CHAT_COMPLETIONS:
        return {"messages": [{"role": "user", "content": prompt}]}
    if route is COMPLETIONS:
        return {"prompt": prompt}
    if route in {EMBEDDINGS, CLASSIFY, MODERATIONS, POOLING, DECISIONS, RESPONSES}:
        return {"input": prompt}
    if route in {TRANSCRIPTIONS, TRANSLATIONS}:
        return {FILE_URL: prompt}
    names = request_types(route)[0].model_fields
    own = next(name for name in names if name in PROMPT_FIELDS and name != "prompt")
    raise RecipeError(f"{route.name} has no `prompt`: use its own fields, such as `{own}`")


def _text(keys: Mapping[str, Any], name: str) -> str | None:
    value = keys.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise RecipeError(f"`{name}` must be a string")
    return value


def _flag(keys: Mapping[str, Any], name: str) -> bool:
    value = keys.get(name, False)
    if not isinstance(value, bool):
        raise RecipeError(f"`{name}` must be true or false")
    return value


def _priority(keys: Mapping[str, Any]) -> int | None:
    value = keys.get("priority")
    if value is None or is_priority(value):
        return value
    raise RecipeError(
        f"`priority` is {value!r}: it must be an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}"
    )


def _names(keys: Mapping[str, Any]) -> tuple[str, ...] | None:
    value = keys.get("keep")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RecipeError("`keep` must be a list of column names, such as keep = ['review_id']")
    return tuple(dict.fromkeys(value))


def _choice(keys: Mapping[str, Any], name: str, choices: Sequence[str]) -> Any:
    value = keys.get(name)
    if value is not None and value not in choices:
        raise RecipeError(f"`{name}` is {value!r}: it must be one of {', '.join(choices)}")
    return value
