"""Questions and answers of a decision, independent of the wire format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..errors import RequestError

if TYPE_CHECKING:
    from ..chat import ReasoningEffort

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MAX_ORDERS = 64
MAX_READS = 8_192
MAX_SHOWN_OPTIONS = 2**18
"""Limit on the options of all reads of a request: each takes some microseconds to print."""


Kind = Literal["predicate", "choice", "score"]
Layout = Literal["row_first", "questions_first"]
DecideBy = Literal["decision", "chat"]


@dataclass(frozen=True, slots=True)
class Image:
    """An image of the input, with its place in the body."""

    place: str
    url: str


Part = str | Image


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a question: its text as the model reads it, and a description."""

    text: str
    description: str | None = None


YES, NO = Option("Yes"), Option("No")


@dataclass(frozen=True, slots=True)
class Question:
    """A question; the options of a predicate are yes and no, those of a score are its levels."""

    kind: Kind
    instructions: tuple[Part, ...]
    options: tuple[Option, ...]


def winner_of(probabilities: Sequence[float]) -> int:
    """Return the index of the most likely option; the first of equal ones."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)


def mean_level(probabilities: Sequence[float]) -> float:
    """Return the expected index of the option: the score of a scale."""
    return sum(level * share for level, share in enumerate(probabilities))


@dataclass(frozen=True, slots=True)
class Answer:
    """Probabilities of a question's options, in their order; they add up to 1.

    `label_mass` is the probability of all labels over the whole vocabulary, `argmax_is_label` says
    whether the most likely token begins a label. Both are means over the orders of the options,
    and None for an answer that was generated.
    With several orders, `agreement` is the share of orders whose winner is that of the mean.
    """

    probabilities: tuple[float, ...]
    label_mass: float | None = None
    argmax_is_label: bool | None = None
    agreement: float | None = None

    @property
    def winner(self) -> int:
        """Return the index of the most likely option; the first of equal ones."""
        return winner_of(self.probabilities)

    def diagnostics(self) -> dict[str, Any]:
        """Return the answer's diagnostics as the body shows them."""
        shown = {
            "label_mass": self.label_mass,
            "argmax_is_label": self.argmax_is_label,
            "agreement": self.agreement,
        }
        return {name: value for name, value in shown.items() if value is not None}


class Decision(Protocol):
    """A decision request of either format."""

    instructions: str | None
    question_layout: Layout | None
    debias: int | None
    seed: int | None
    decide_by: DecideBy | None
    reasoning_effort: ReasoningEffort | None
    max_completion_tokens: int | None
    chat_template_kwargs: dict[str, Any] | None
    cache_salt: str | None

    @property
    def state_parts(self) -> list[Part]:
        """Return the input that the questions are about."""

    @property
    def parsed_questions(self) -> list[Question]:
        """Return the questions in their order."""


def check_size(decision: Decision) -> None:
    """Raise `RequestError` for too many reads, or options in all reads."""
    questions = decision.parsed_questions
    num_reads = len(questions) * (decision.debias or 1)
    if num_reads > MAX_READS:
        raise RequestError(
            f"`debias` times {len(questions)} questions are {num_reads:,} reads; the maximum is "
            f"{MAX_READS:,}: split the request.",
            param="debias",
        )
    num_options = sum(len(question.options) for question in questions)
    total = num_options * (decision.debias or 1)
    if total > MAX_SHOWN_OPTIONS:
        raise RequestError(
            f"The questions have {total:,} options in all orders; the maximum is "
            f"{MAX_SHOWN_OPTIONS:,}: reduce `debias`, or split the request.",
            param="questions",
        )


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return parts with neighboring texts joined, and without empty texts."""
    result: list[Part] = []
    for is_text, some in groupby(parts, lambda part: isinstance(part, str)):
        neighbors = [*some]
        result += ["".join(map(str, neighbors))] if is_text else neighbors
    return [part for part in result if part]
