"""Published prompts: the parts of a decision that a decision model reads in a fixed form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random

from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.decisions.questions import Answer, Decision, Image, Part, Question
from tidemill.protocol.decisions.systemone_body import SystemOneRequest
from tidemill.protocol.errors import RequestError

from .orders import orders

NOT_SUPPORTED = "decisions_not_supported"


def check_fixed(decision: Decision) -> None:
    """Reject instructions, which a fixed prompt has no place for."""
    if decision.instructions:
        raise RequestError(
            "This model reads a fixed prompt without `instructions`: move them to the questions.",
            param="instructions",
            code=NOT_SUPPORTED,
        )


def check_count(path: str, count: int, most: int) -> None:
    """Reject a question with more than `most` options."""
    if count > most:
        raise RequestError(
            f"`{path}` has {count} options; this model supports at most {most} here.",
            param=path,
            code=NOT_SUPPORTED,
        )


def state_text(decision: Decision, write_json: Callable[[object], str]) -> str:
    """Return the input as text; a state that is not a string is written as JSON."""
    if isinstance(decision, SystemOneRequest) and not isinstance(decision.state, str):
        for part in decision.state_parts:
            _check_text(part)
        return write_json(decision.state)
    return text_of(decision.state_parts)


def text_of(parts: Sequence[Part]) -> str:
    """Return the parts as one text; raises `RequestError` for an image."""
    return "".join(map(_check_text, parts))


def question_ids(decision: Decision) -> list[str]:
    """Return the ID of each question: its name, or its number from 1."""
    if isinstance(decision, SystemOneRequest):
        return list(decision.questions)
    assert isinstance(decision, DecisionRequest)
    return [question.name or str(n) for n, question in enumerate(decision.questions, 1)]


def question_paths(decision: Decision) -> list[str]:
    """Return the place of each question in the body."""
    if isinstance(decision, SystemOneRequest):
        return [f"questions.{name}" for name in decision.questions]
    return [f"questions.{place}" for place in range(len(decision.parsed_questions))]


def no_before_yes(question: Question) -> Sequence[int]:
    """Return the published order of a question's options: no, then yes, in a predicate."""
    return (1, 0) if question.kind == "predicate" else range(len(question.options))


def shown_orders(
    decision: Decision, number: int, published: Sequence[int], seed: int
) -> Iterator[tuple[int, ...]]:
    """Yield the orders of a question's options: the published one, or `debias` others."""
    random = Random(f"{seed} {number}")  # noqa: S311
    for order in orders(len(published), decision.debias or 1, random):
        yield tuple(published[place] for place in order)


def answer_of(logits: Sequence[float], order: Sequence[int]) -> Answer:
    """Return the softmax of logits, which belong to the options in `order`."""
    most = max(logits)
    weights = [math.exp(logit - most) for logit in logits]
    total = math.fsum(weights)
    shares = [0.0] * len(order)
    for option, weight in zip(order, weights, strict=True):
        shares[option] = weight / total
    return Answer(tuple(shares), 1.0, argmax_is_label=True)


def default_json(value: object) -> str:
    """Return JSON with Python's default separators."""
    return json.dumps(value, ensure_ascii=False)


def compact_json(value: object) -> str:
    """Return JSON without spaces and with sorted keys."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _check_text(part: Part) -> str:
    if isinstance(part, Image):
        raise RequestError(
            f"`{part.place}` is an image, but decision models read only text here: send text, or"
            " use a vision model such as Qwen3-VL.",
            param=part.place,
            code="images_not_supported",
        )
    return part
