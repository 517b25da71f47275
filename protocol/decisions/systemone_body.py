"""`/v1/systemone`: the request body of TypeSafe's System One, and the response body."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from ..chat import ReasoningEffort
from ..contract import Usage
from ..errors import RequestError
from ..fields import Priority, Seed, Text, Whole
from ..parts import CheckedUrl
from .body_fields import Filled, NumOrders, TemplateVariables, checked_text, text_of_json
from .questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Answer,
    DecideBy,
    Image,
    Kind,
    Layout,
    Option,
    Part,
    Question,
    check_size,
    mean_level,
    merged,
)

_KINDS: dict[str, Kind] = {"choice": "choice", "noul": "predicate", "score": "score"}


class SystemOneQuestion(BaseModel):
    """A question; the form of its `criteria` depends on its `type`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["choice", "noul", "score"]
    instructions: Any = ""
    criteria: Any = None


_Questions = dict[str, SystemOneQuestion]


def _one_by_one(value: object, validate: ValidatorFunctionWrapHandler) -> _Questions:
    """Validate questions up to the first with a fault."""
    if not isinstance(value, dict):
        return cast("_Questions", validate(value))
    if not value:
        raise ValueError("must not be empty")
    if len(value) > MAX_QUESTIONS:
        raise ValueError(f"must not have more than {MAX_QUESTIONS} items")
    if "" in value:
        raise ValueError("must not have an empty name")
    checked: _Questions = {}
    for name, question in value.items():
        checked |= validate({name: question})
    return checked


class SystemOneRequest(BaseModel):
    """The body of a request to `/v1/systemone`.

    The last fields, from the layout on, are additions of Tidemill, as at `/v1/decisions`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    state: Any
    questions: Annotated[dict[Text, SystemOneQuestion], WrapValidator(_one_by_one)]
    instructions: Text | None = None
    images: Annotated[list[CheckedUrl], Field(fail_fast=True)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_salt: Filled | None = None
    priority: Priority | None = None

    question_layout: Layout | None = None
    debias: NumOrders | None = None
    seed: Seed | None = None
    decide_by: DecideBy | None = None
    reasoning_effort: ReasoningEffort | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse criteria of a wrong form, and an empty state."""
        check_size(self)
        if not self.state_parts:
            raise RequestError("`state` must not be empty.", param="state")
        return self

    @cached_property
    def state_parts(self) -> list[Part]:
        """Return the input that the questions are about: the images, then the state's text."""
        images = [Image(f"images.{place}", url) for place, url in enumerate(self.images or ())]
        return merged([*images, text_of_json(self.state, "state")])

    @cached_property
    def parsed_questions(self) -> list[Question]:
        """Return the questions in their order; raise `RequestError` for invalid criteria."""
        return [_question(name, question) for name, question in self.questions.items()]


def _question(name: str, question: SystemOneQuestion) -> Question:
    path = f"questions.{name}.instructions"
    text = "" if question.instructions is None else text_of_json(question.instructions, path)
    if not text.strip():
        raise RequestError(f"`{path}` is required.", param=path)
    path = f"questions.{name}.criteria"
    options = _OPTIONS[question.type](path, question.criteria)
    for option in options:
        checked_text(f"{option.text}{option.description}", path)
    return Question(_KINDS[question.type], (text,), options)


def _choices(path: str, criteria: object) -> tuple[Option, ...]:
    if not isinstance(criteria, dict) or not _all_texts(criteria.values(), or_null=True):
        raise _wrong(path, "an object of descriptions (or null) by option")
    _check_number(path, len(criteria), "options", least=1)
    if not all(map(str.strip, criteria)):
        raise _wrong(path, "an object without an empty option")
    return tuple(Option(text, description) for text, description in criteria.items())


def _yes_and_no(path: str, criteria: object) -> tuple[Option, ...]:
    given = {} if criteria is None else criteria
    if (
        not isinstance(given, dict)
        or not given.keys() <= {"true", "false"}
        or not _all_texts(given.values(), or_null=True)
    ):
        raise _wrong(path, "null, or an object with the descriptions `true` and `false`")
    return Option("Yes", given.get("true")), Option("No", given.get("false"))


def _levels(path: str, criteria: object) -> tuple[Option, ...]:
    if not isinstance(criteria, list) or not _all_texts(criteria):
        raise _wrong(path, "a list of levels, the lowest first")
    if not all(map(str.strip, criteria)):
        raise _wrong(path, "a list without an empty level")
    if len(set(criteria)) < len(criteria):
        raise _wrong(path, "a list of distinct levels")
    _check_number(path, len(criteria), "levels", least=2)
    return tuple(map(Option, criteria))


_OPTIONS = {"choice": _choices, "noul": _yes_and_no, "score": _levels}


def _all_texts(values: Any, *, or_null: bool = False) -> bool:
    return all(isinstance(value, str) or (or_null and value is None) for value in values)


def _check_number(path: str, count: int, what: str, *, least: int) -> None:
    if not least <= count <= MAX_OPTIONS:
        raise RequestError(
            f"`{path}` must have {least} to {MAX_OPTIONS} {what}; got {count}.", param=path
        )


def _wrong(path: str, form: str) -> RequestError:
    return RequestError(f"`{path}` must be {form}.", param=path)


def systemone_body(
    request: SystemOneRequest,
    answers: Sequence[Answer],
    body_id: str,
    *,
    created: int,
    model: str,
    usage: Usage,
) -> dict[str, Any]:
    """Return the response body, with answers by the names of their questions."""
    by_name = dict(
        zip(request.questions, zip(request.parsed_questions, answers, strict=True), strict=True)
    )
    return {
        "id": body_id,
        "object": "structured_decision",
        "created": created,
        "model": model,
        "answers": {
            name: _answer_body(question, answer) for name, (question, answer) in by_name.items()
        },
        "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens},
        "diagnostics": {name: answer.diagnostics() for name, (_, answer) in by_name.items()},
    }


def _answer_body(question: Question, answer: Answer) -> dict[str, Any]:
    shares, winner = answer.probabilities, answer.winner
    confidence = shares[winner] * (1.0 if answer.label_mass is None else answer.label_mass)
    if question.kind == "predicate":
        yes, no = shares
        return {
            "type": "noul",
            "noul": yes,
            "probabilities": {"yes": yes, "no": no},
            "confidence": confidence,
        }
    texts = [option.text for option in question.options]
    if question.kind == "choice":
        return {
            "type": "choice",
            "choice": texts[winner],
            "probabilities": dict(zip(texts, shares, strict=True)),
            "confidence": confidence,
        }
    return {
        "type": "score",
        "score": mean_level(answer.probabilities),
        "legend": {str(index): text for index, text in enumerate(texts)},
        "probabilities": {str(index): share for index, share in enumerate(shares)},
        "confidence": confidence,
    }
