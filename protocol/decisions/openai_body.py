"""`/v1/decisions`: the request body of OpenAI's Decisions API, and the response body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..chat import ReasoningEffort
from ..contract import Usage
from ..errors import RequestError
from ..fields import Priority, Seed, Text, Whole, text_or_list_of
from ..validation import NOT_DISTINCT, short_repr
from .body_fields import Filled, NumOrders, OptionText, TemplateVariables
from .input_items import Content, InputItem, content_parts, item_parts
from .questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    NO,
    YES,
    Answer,
    DecideBy,
    Image,
    Layout,
    Option,
    Part,
    Question,
    check_size,
    mean_level,
    merged,
)

# Fields with the options of a question, by its type.
_FIELDS = {"choice": "choices", "score": "levels"}


def _value_form(value: object) -> str:
    return "<boolean>" if isinstance(value, bool) else "<text>"


def _check_distinct(values: Iterable[str | bool]) -> None:
    seen = set()
    for value in values:
        key = type(value), value
        if key in seen:
            raise PydanticCustomError(
                NOT_DISTINCT,
                "must be distinct, but {value} occurs twice",
                {"value": short_repr(value)},
            )
        seen.add(key)


def _distinct(choices: list[Choice]) -> list[Choice]:
    _check_distinct(choice.value for choice in choices)
    return choices


def _distinct_labels(levels: list[Level]) -> list[Level]:
    _check_distinct(level.label for level in levels)
    return levels


def _question_type(value: object) -> object:
    if value != "predicate":
        raise ValueError("must be 'predicate', 'choice' or 'score'")
    return value


class _Question(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    instructions: Content
    name: Text | None = None


class Predicate(_Question):
    """A question that is answered with yes or no."""

    type: Annotated[Literal["predicate"], BeforeValidator(_question_type)]


class Choice(BaseModel):
    """One choice; a string and a boolean of the same text are distinct."""

    model_config = ConfigDict(extra="forbid", strict=True)

    value: Annotated[
        Annotated[OptionText, Tag("<text>")] | Annotated[StrictBool, Tag("<boolean>")],
        Discriminator(_value_form),
    ]
    description: Text | None = None


class ChoiceQuestion(_Question):
    """A question that is answered with one of its choices."""

    type: Literal["choice"]
    choices: Annotated[
        list[Choice],
        Field(fail_fast=True, max_length=MAX_OPTIONS),
        AfterValidator(_distinct),
    ]


class Level(BaseModel):
    """One level of a scale."""

    model_config = ConfigDict(extra="forbid", strict=True)

    label: OptionText
    description: Text | None = None


class ScoreQuestion(_Question):
    """A question that is answered with a level of a scale, the lowest first."""

    type: Literal["score"]
    levels: Annotated[
        list[Level],
        Field(fail_fast=True, max_length=MAX_OPTIONS),
        AfterValidator(_distinct_labels),
    ]


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("choice", "score") else "<predicate>"


AnyQuestion = Annotated[
    Annotated[Predicate, Tag("<predicate>")]
    | Annotated[ChoiceQuestion, Tag("<choice>")]
    | Annotated[ScoreQuestion, Tag("<score>")],
    Discriminator(_kind),
]


class DecisionRequest(BaseModel):
    """The body of a request to `/v1/decisions`.

    The fields from `instructions` on are additions of Tidemill: context before the input, the
    layout of the prompt, the number of orders of the options (`debias`) and its seed. With
    `decide_by` "chat", the answers are generated, after reasoning of this effort and length.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    input: Annotated[
        Annotated[Filled, Tag("<text>")]
        | Annotated[list[InputItem], Field(fail_fast=True, min_length=1), Tag("<list>")],
        text_or_list_of("items"),
    ]
    questions: Annotated[
        list[AnyQuestion], Field(fail_fast=True, min_length=1, max_length=MAX_QUESTIONS)
    ]

    instructions: Text | None = None
    question_layout: Layout | None = None
    debias: NumOrders | None = None
    seed: Seed | None = None
    decide_by: DecideBy | None = None
    reasoning_effort: ReasoningEffort | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_salt: Filled | None = None
    priority: Priority | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for place, question in enumerate(self.questions):
            field = _FIELDS.get(question.type)
            if field is not None and len(getattr(question, field)) < 2:
                path = f"questions.{place}.{field}"
                raise RequestError(f"`{path}` must have at least 2 items.", param=path)
        check_size(self)
        if not self.state_parts:
            raise RequestError("`input` must not be empty.", param="input")
        return self

    @cached_property
    def state_parts(self) -> list[Part]:
        """Return the input that the questions are about: its text, or a transcript of its items."""
        if isinstance(self.input, str):
            return [self.input]
        return merged(item_parts(self.input, "input"))

    @cached_property
    def parsed_questions(self) -> list[Question]:
        """Return the questions in their order."""
        return [_question(place, question) for place, question in enumerate(self.questions)]


def _question(place: int, question: AnyQuestion) -> Question:
    path = f"questions.{place}.instructions"
    instructions = tuple(merged(content_parts(question.instructions, path)))
    if not any(isinstance(part, Image) or part.strip() for part in instructions):
        raise RequestError(f"`{path}` must not be empty.", param=path)
    match question:
        case Predicate():
            options: tuple[Option, ...] = (YES, NO)
        case ChoiceQuestion():
            has_boolean = any(isinstance(one.value, bool) for one in question.choices)
            options = tuple(
                Option(_shown(one, has_boolean=has_boolean), one.description)
                for one in question.choices
            )
        case _:
            options = tuple(Option(one.label, one.description) for one in question.levels)
    return Question(question.type, instructions, options)


def _shown(choice: Choice, *, has_boolean: bool) -> str:
    """Return a choice as the model reads it; quotes distinguish a text from a boolean."""
    if isinstance(choice.value, bool):
        return "true" if choice.value else "false"
    is_ambiguous = has_boolean and choice.value in {"true", "false"}
    return f'"{choice.value}"' if is_ambiguous else choice.value


def decision_body(
    request: DecisionRequest, answers: Sequence[Answer], *, model: str, usage: dict[str, Any]
) -> dict[str, Any]:
    """Return the response body, with answers in the order of the questions."""
    return {
        "model": model,
        "answers": [
            _answer_body(question, answer)
            for question, answer in zip(request.questions, answers, strict=True)
        ],
        "usage": usage,
        "diagnostics": [
            {"name": question.name, **answer.diagnostics()}
            for question, answer in zip(request.questions, answers, strict=True)
        ],
    }


def decision_usage(usage: Usage, *, shows_cached_tokens: bool) -> dict[str, Any]:
    """Return the usage of a decision; only a chat generates tokens."""
    cached = usage.cached_tokens if shows_cached_tokens else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _answer_body(question: AnyQuestion, answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = {"type": question.type, "name": question.name}
    if isinstance(question, Predicate):
        return {**body, "probability": answer.probabilities[0]}
    confidence = answer.probabilities[answer.winner]
    if isinstance(question, ChoiceQuestion):
        return {
            **body,
            "choice": question.choices[answer.winner].value,
            "confidence": confidence,
            "probabilities": [
                {"value": choice.value, "probability": share}
                for choice, share in zip(question.choices, answer.probabilities, strict=True)
            ],
        }
    return {
        **body,
        "score": mean_level(answer.probabilities),
        "confidence": confidence,
        "probabilities": [
            {"value": index, "label": level.label, "probability": share}
            for index, (level, share) in enumerate(
                zip(question.levels, answer.probabilities, strict=True)
            )
        ],
    }
