"""Decision prompts: one prompt for each read of a question, in one of two layouts.

*Row first*: the input, then one question; the reads of a request share the input. *Questions
first*: all questions, then the input; the answer begins with a few tokens that name the question.
The rows of a file share the questions, the reads of a request share the questions and the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.decisions.questions import Decision, Image, Kind, Part, Question, merged
from tidemill.protocol.errors import RequestError
from tidemill.protocol.messages import Message
from tidemill.protocol.parts import ImagePart, ImageUrl, TextPart

from ...parsers.harmony import HARMONY
from ...parsers.registry import ParserSet
from ...text.label_tokens import NO_LABELS, LabelTokens, LabelTree
from ...text.text_model import TextModel
from ..chat_preprocessor import ChatPreprocessor
from ..endpoint import RequestMetadata
from .orders import orders

_ASKS: dict[Kind, str] = {
    "predicate": "Answer only with one letter: {labels}.",
    "choice": "Answer only with the letter of the best option.",
    "score": "Answer only with the number of the level.",
}
# Letters have one spelling only, which one read covers; `Yes` may begin with `Y` or `Ye`.
YES_AND_NO = ("Y", "N")
_MEANINGS = ("yes", "no")
_CODES = "Answer only with the letters of the best option."


@dataclass(frozen=True, slots=True)
class Read:
    """One read: a question by its index, in one `order` of its options.

    `labels` are those of `tree`; option `i` has the label with the index `places[i]`.
    """

    question: int
    order: tuple[int, ...]
    labels: tuple[str, ...]
    places: tuple[int, ...]
    tree: LabelTree = NO_LABELS

    def label(self, option: int) -> str:
        """Return the label of an option."""
        return self.labels[self.places[option]]


class DecisionPrompts:
    """Writes the prompts of one model's decisions; a model without a template reads plain text."""

    def __init__(self, model: TextModel, parsers: ParserSet) -> None:
        self._chats = None if model.chat_template is None else ChatPreprocessor(model, parsers)
        self._reasoning = parsers.reasoning
        self._final = HARMONY.final if parsers.has_channels else ""
        self._labels = LabelTokens(model)

    def reads(self, decision: Decision, questions: Sequence[Question], seed: int) -> list[Read]:
        """Return the reads of all questions, each in as many orders as the request has.

        They have no trees yet: see `with_tree`.
        """
        reads = []
        for number, question in enumerate(questions):
            labels = self._labels_of(question)
            count = len(question.options)
            for order in orders(count, decision.debias or 1, Random(f"{seed} {number}")):  # noqa: S311
                places = _places(question.kind, order)
                reads.append(Read(number, order, labels, places))
        return reads

    def with_tree(self, read: Read, prompt: str) -> Read:
        """Return a read with the ways to spell its labels after the end of its prompt."""
        return replace(read, tree=self._labels.tree(read.labels, after_space=prompt[-1:].isspace()))

    def contents(
        self, decision: Decision, questions: Sequence[Question], reads: Sequence[Read]
    ) -> Iterator[list[Part]]:
        """Yield the parts of each read's message; reads with the same message yield one list."""
        if decision.question_layout != "questions_first":
            for read in reads:
                yield merged(_row_first(decision, questions[read.question], read))
            return
        has_orders = (decision.debias or 1) > 1
        shared = merged(_questions_first(decision, questions, reads, has_orders=has_orders))
        for read in reads:
            if has_orders:
                options = _short_options(questions[read.question], read)
                yield merged([*shared, f"\n\n{options}"])
            else:
                yield shared

    def rendered(
        self, decision: Decision, content: Sequence[Part], metadata: RequestMetadata
    ) -> str:
        """Return the text of a message, up to the beginning of its answer."""
        if self._chats is None:
            return _plain(content)
        request = ChatCompletionRequest.model_construct(
            messages=[_message(content)],
            chat_template_kwargs=decision.chat_template_kwargs,
            reasoning_effort="none",
        )
        prompt = self._chats.prompt_text(request, metadata.created)
        return prompt + self._answer_start(prompt)

    def lead(self, decision: Decision, questions: Sequence[Question], read: Read) -> str:
        """Return the beginning of an answer, which names its question if all come first."""
        lead = ""
        if decision.question_layout == "questions_first":
            number = "" if len(questions) == 1 else f" to question {read.question + 1}"
            lead = f"Answer{number}:\n"
        return lead if self._chats is not None else f"\n\n{lead or 'Answer:'}"

    def _answer_start(self, prompt: str) -> str:
        """Return the marks that end the reasoning, which a prompt may have opened."""
        if self._final:
            return self._final
        reasoning = self._reasoning
        if reasoning is None or reasoning.start_after(prompt) != "open":
            return ""
        opened = "" if prompt.rstrip().endswith(reasoning.opens) else reasoning.opens[0]
        return f"{opened}\n{reasoning.closes[0]}\n\n"

    def _labels_of(self, question: Question) -> tuple[str, ...]:
        count = len(question.options)
        if question.kind == "predicate":
            return YES_AND_NO
        letters, levels = self._labels.letters, self._labels.levels
        return letters(count) if question.kind == "choice" else levels(count)


def _places(kind: Kind, order: Sequence[int]) -> tuple[int, ...]:
    """Return the label of each option, by its index; only choices are labelled by their place."""
    if kind != "choice":
        return tuple(range(len(order)))
    places = [0] * len(order)
    for place, option in enumerate(order):
        places[option] = place
    return tuple(places)


def _row_first(decision: Decision, question: Question, read: Read) -> Iterator[Part]:
    if decision.instructions:
        yield f"{decision.instructions}\n\n"
    yield from decision.state_parts
    yield "\n\nQuestion: "
    yield from question.instructions
    yield from _option_lines(question, read)
    yield f"\n{_ask(question, read)}"


def _questions_first(
    decision: Decision, questions: Sequence[Question], reads: Sequence[Read], *, has_orders: bool
) -> Iterator[Part]:
    """Yield the message that the reads share; if they have orders, each adds its own labels."""
    read_of = {read.question: read for read in reads}
    if decision.instructions:
        yield f"{decision.instructions}\n\n"
    for number, question in enumerate(questions):
        read = read_of[number]
        yield "Question: " if len(questions) == 1 else f"Question {number + 1}: "
        yield from question.instructions
        yield from _option_lines(question, None if has_orders else read)
        if not (has_orders and question.kind == "predicate"):
            yield f"\n{_ask(question, read)}"
        yield "\n\n"
    yield "Input:\n"
    yield from decision.state_parts


def _option_lines(question: Question, read: Read | None) -> Iterator[str]:
    """Yield a line for each option, in the order of a read; without a read, without labels."""
    order = range(len(question.options)) if read is None else read.order
    for index in order:
        option = question.options[index]
        if question.kind == "predicate":
            if option.description:
                label = option.text if read is None else read.label(index)
                yield f"\n{label}: {option.description}"
            continue
        label = "-" if read is None else f"{read.label(index)}:"
        described = f" ({option.description})" if option.description else ""
        yield f"\n{label} {option.text}{described}"


def _short_options(question: Question, read: Read) -> str:
    if question.kind == "predicate":
        return _ask(question, read)
    labelled = [f"{read.label(index)}: {question.options[index].text}" for index in read.order]
    return "\n".join(labelled)


def _ask(question: Question, read: Read) -> str:
    if question.kind == "predicate":
        meanings = [f"{read.label(index)} for {_MEANINGS[index]}" for index in read.order]
        return _ASKS["predicate"].format(labels=" or ".join(meanings))
    is_coded = any(len(label) > 1 for label in read.labels)
    return _CODES if is_coded else _ASKS[question.kind]


def _plain(content: Sequence[Part]) -> str:
    for part in content:
        if isinstance(part, Image):
            raise RequestError(
                f"`{part.place}` is an image: this model does not support images.",
                param=part.place,
                code="images_not_supported",
            )
    return "".join(part for part in content if isinstance(part, str))


def _message(content: Sequence[Part]) -> Message:
    if all(isinstance(part, str) for part in content):
        return Message.model_construct(role="user", content="".join(map(str, content)))
    parts: list[Any] = [
        TextPart.model_construct(type="text", text=part)
        if isinstance(part, str)
        else ImagePart.model_construct(
            type="image_url", image_url=ImageUrl.model_construct(url=part.url)
        )
        for part in content
    ]
    return Message.model_construct(role="user", content=parts)
