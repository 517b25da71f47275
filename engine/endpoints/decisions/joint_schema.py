"""Clef: one sequence with the input and all questions, whose options a head scores together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.decisions.questions import Answer, Decision, Kind, Question
from tidemill.protocol.errors import RequestError

from ...scheduling.encoding import EncodingRequest, EncodingResult, SchemaSpans, Span
from ...text.truncation import Truncation
from ..encoder_requests import EncoderModel
from ..endpoint import Prepared, RequestMetadata
from .orders import decision_seed, mean_answer
from .published_prompts import (
    answer_of,
    check_fixed,
    compact_json,
    question_ids,
    shown_orders,
    state_text,
    text_of,
)
from .reader import OneStepReader

# The prompt that the model was trained with; each piece is tokenized on its own.
_BEGIN = (
    "<|im_start|>system\nRead the complete state and schema. Decide every field jointly. Each "
    "answer must be exactly one of that field's allowed options.<|im_end|>\n"
    "<|im_start|>user\nSTATE:\n"
)
_END = "\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"
_KINDS: dict[Kind, tuple[int, str]] = {
    "predicate": (0, "noul"),
    "choice": (1, "choice"),
    "score": (2, "score"),
}
_SIDES = (
    ("true", "The proposition is true or the answer is yes."),
    ("false", "The proposition is false or the answer is no."),
)
# The longest prompt of the training.
_MAX_TOKENS = 16_384

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JointReads:
    """A decision with the orders of its questions' options: a list for each sequence."""

    decision: Decision
    orders: list[list[Order]]


_Prepared = Prepared[EncodingRequest, JointReads]


class JointReader(OneStepReader):
    """A `DecisionReader` of a model with a joint schema head."""

    def __init__(self, model: EncoderModel) -> None:
        self._reader = model.reader
        most = model.truncate_prompt_tokens
        self._truncates = most is not None
        self._limit = min(_MAX_TOKENS, model.max_model_len)
        if most is not None and most > 0:
            self._limit = min(self._limit, most)

    def prepare(
        self, decision: Decision, param: str, metadata: RequestMetadata, body: Mapping[str, Any]
    ) -> _Prepared:
        """Return a sequence for each order of the options."""
        del body
        check_fixed(decision)
        state = self._tokens(state_text(decision, compact_json))
        questions, ids = decision.parsed_questions, question_ids(decision)
        seed = decision_seed(decision)
        of_question = [
            list(shown_orders(decision, number, _published_order(question), seed))
            for number, question in enumerate(questions)
        ]
        requests, used = [], []
        for place in range(max(map(len, of_question))):
            orders = [own[place % len(own)] for own in of_question]
            requests.append(self._request(state, questions, ids, orders, param))
            used.append(orders)
        return Prepared(requests, JointReads(decision, used), metadata)

    def answers(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> list[Answer]:
        """Return the answer of each question: the mean over the orders of its options."""
        of_question: list[dict[Order, Answer]] = [{} for _ in prepared.context.orders[0]]
        for orders, result in zip(prepared.context.orders, results, strict=True):
            logits, start = result.values.tolist(), 0
            for answers, order in zip(of_question, orders, strict=True):
                answers[order] = answer_of(logits[start : start + len(order)], order)
                start += len(order)
        return [mean_answer(list(answers.values())) for answers in of_question]

    def _request(
        self,
        state: list[int],
        questions: Sequence[Question],
        ids: Sequence[str],
        orders: Sequence[Order],
        param: str,
    ) -> EncodingRequest:
        schema = _Schema(self._tokens("\n\nSCHEMA FIELDS:\n"))
        for number, (question, name) in enumerate(zip(questions, ids, strict=True), 1):
            _, kind = _KINDS[question.kind]
            schema.tokens += self._tokens(
                f"\nFIELD {number}\nID: {name}\nTYPE: {kind}\nINSTRUCTION: "
            )
            schema.questions.append(schema.add(self._tokens(text_of(question.instructions))))
            schema.tokens += self._tokens("\nALLOWED OPTIONS:\n")
            spans = []
            for place, option in enumerate(orders[number - 1], 1):
                schema.tokens += self._tokens(f"OPTION {place}: ")
                spans.append(schema.add(self._tokens(_option_text(question, option))))
                schema.tokens += self._tokens("\n")
            schema.tokens += self._tokens("END FIELD\n")
            schema.options.append(spans)
        begin, end = self._tokens(_BEGIN), self._tokens(_END)
        left = self._limit - len(begin) - len(schema.tokens) - len(end)
        if left < (1 if self._truncates else len(state)):
            raise RequestError(
                f"This model's maximum context length is {self._limit} tokens. However, the "
                f"questions have {self._limit - left} tokens and `{param}` {len(state)}. To "
                "truncate the input, pass --truncate-prompt-tokens -1.",
                param=param,
                code="context_length_exceeded",
            )
        before = [*begin, *state[:left]]
        kinds = tuple(_KINDS[question.kind][0] for question in questions)
        tokens = [*before, *schema.tokens, *end]
        return EncodingRequest(tokens, schema=schema.spans(kinds, len(before)))

    def _tokens(self, text: str) -> list[int]:
        return self._reader.encode([text], Truncation(), add_special_tokens=False)[0]


class _Schema:
    """The tokens of the questions, and the spans within them."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.questions: list[Span] = []
        self.options: list[list[Span]] = []

    def add(self, tokens: list[int]) -> Span:
        """Append tokens, and return their span."""
        start = len(self.tokens)
        self.tokens += tokens
        return start, len(self.tokens)

    def spans(self, kinds: tuple[int, ...], offset: int) -> SchemaSpans:
        """Return the spans in a sequence in which the schema begins at `offset`."""

        def moved(spans: Sequence[Span]) -> tuple[Span, ...]:
            return tuple((start + offset, stop + offset) for start, stop in spans)

        return SchemaSpans(kinds, moved(self.questions), tuple(map(moved, self.options)))


def _published_order(question: Question) -> Sequence[int]:
    """Return the order that the model was trained with: choices by their names."""
    places = range(len(question.options))
    if question.kind != "choice":
        return places
    return sorted(places, key=lambda place: question.options[place].text)


def _option_text(question: Question, index: int) -> str:
    option = question.options[index]
    description = option.description
    if question.kind == "predicate":
        name, default = _SIDES[index]
        return compact_json({"option_id": name, "description": description or default})
    if question.kind == "score":
        level = option.text if description is None else f"{option.text}: {description}"
        return compact_json({"option_id": str(index), "description": level})
    semantics = {} if description is None else {"description": description}
    return compact_json({"option_id": option.text, **semantics})
