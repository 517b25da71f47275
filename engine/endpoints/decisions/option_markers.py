"""Laya and Julia: one sequence for each question, with a mask token before each option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.decisions.questions import Answer, Decision, Question
from tidemill.protocol.decisions.systemone_body import SystemOneRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fields import Side

from ...model.encoders.decision_heads import MARKER_KINDS, MarkerHead
from ...scheduling.encoding import EncodingRequest, EncodingResult, SchemaSpans, Span
from ...text.truncation import Truncation
from ..encoder_requests import EncoderModel
from ..endpoint import Prepared, RequestMetadata
from ..request_bounds import check_prompt_tokens
from .orders import decision_seed, mean_answers
from .published_prompts import (
    NOT_SUPPORTED,
    answer_of,
    check_count,
    check_fixed,
    default_json,
    no_before_yes,
    question_paths,
    shown_orders,
    state_text,
    text_of,
)
from .reader import OneStepReader

MARKS = frozenset({"cls_token", "sep_token", "mask_token"})
"""Special tokens that the model's tokenizer must have."""

_KINDS = {"choice": "choice", "score": "score", "predicate": "noul"}
_SIDES = {
    "No": ("false", "no, the statement does not hold"),
    "Yes": ("true", "yes, the statement holds"),
}
# The longest option of the training, and the fewest tokens that options leave for the question.
_MAX_OPTION_TOKENS, _LEAST_QUESTION_TOKENS = 48, 16

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MarkerReads:
    """A decision with its questions and reads: each a question's index and its options' order."""

    decision: Decision
    questions: list[Question]
    reads: list[tuple[int, Order]]


_Prepared = Prepared[EncodingRequest, MarkerReads]


class MarkerReader(OneStepReader):
    """A `DecisionReader` of a model with option markers."""

    def __init__(self, model: EncoderModel, head: MarkerHead) -> None:
        self._reader, self._head = model.reader, head
        ids = {name: token for name, (_, token) in model.special_tokens.items()}
        self._begin, self._end = ids["cls_token"], ids["sep_token"]
        self._mask_text, self._mask = model.special_tokens["mask_token"]
        self._limit = model.max_model_len
        self._truncates = model.truncate_prompt_tokens is not None

    def prepare(
        self, decision: Decision, param: str, metadata: RequestMetadata, body: Mapping[str, Any]
    ) -> _Prepared:
        """Return a sequence for each question, in each order of its options."""
        del body
        check_fixed(decision)
        questions, seed = decision.parsed_questions, decision_seed(decision)
        side: Side = "left" if _is_list(decision) else "right"
        state, num_tokens = self._tokens(state_text(decision, default_json), side), 0
        requests, reads = [], []
        for number, (question, path) in enumerate(
            zip(questions, question_paths(decision), strict=True)
        ):
            check_count(path, len(question.options), self._head.max_options)
            for order in shown_orders(decision, number, no_before_yes(question), seed):
                before, markers = self._question_tokens(question, order, path)
                ids = [*before, *self._fitting(decision, state, len(before), param), self._end]
                num_tokens += len(ids)
                check_prompt_tokens(num_tokens, "questions")
                kind = MARKER_KINDS.index(_KINDS[question.kind])
                spans = SchemaSpans((kind,), ((0, len(before)),), (markers,))
                requests.append(EncodingRequest(ids, schema=spans))
                reads.append((number, order))
        return Prepared(requests, MarkerReads(decision, questions, reads), metadata)

    def answers(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> list[Answer]:
        """Return the answer of each question: the mean over the orders of its options."""
        temperatures = list(map(self._temperature, prepared.context.questions))
        return mean_answers(
            (number, answer_of((result.values / temperatures[number]).tolist(), order))
            for (number, order), result in zip(prepared.context.reads, results, strict=True)
        )

    def _question_tokens(
        self, question: Question, order: Order, path: str
    ) -> tuple[list[int], tuple[Span, ...]]:
        """Return the tokens of a question and its options, and the spans of the options."""
        kind = _KINDS[question.kind]
        head = self._tokens(f"{kind} question: {text_of(question.instructions)}")
        options = [self._tokens(f" {self._option_text(question, option)}") for option in order]
        most, longest = self._head.max_question_tokens, max(map(len, options))
        left = most - sum(len(option) + 1 for option in options)
        share = max(4, (most - _LEAST_QUESTION_TOKENS) // len(options))
        is_cut = left < _LEAST_QUESTION_TOKENS and longest >= share
        if longest > _MAX_OPTION_TOKENS or is_cut or len(head) > left:
            raise RequestError(
                f"`{path}` has {len(head)} tokens, and its options have {most - left}, the longest "
                f"{longest}: this model reads at most {most} of both, and {_MAX_OPTION_TOKENS} of "
                "an option. Shorten them or split the question.",
                param=path,
                code=NOT_SUPPORTED,
            )
        tokens, markers = [self._begin, *head, self._end], []
        for option in options:
            start = len(tokens)
            tokens += [self._mask, *option]
            markers.append((start, len(tokens)))
        return [*tokens, self._end], tuple(markers)

    def _fitting(
        self, decision: Decision, state: list[int], num_before: int, param: str
    ) -> list[int]:
        """Return the tokens of the input that fit after a question; a list loses its beginning."""
        left = self._limit - num_before - 1
        if len(state) <= left:
            return state
        if not self._truncates or left < 1:
            raise RequestError(
                f"This model's maximum context length is {self._limit} tokens. However, a question "
                f"has {num_before} tokens and `{param}` {len(state)}. To truncate the input, pass "
                "--truncate-prompt-tokens -1.",
                param=param,
                code="context_length_exceeded",
            )
        return state[-left:] if _is_list(decision) else state[:left]

    def _option_text(self, question: Question, index: int) -> str:
        option = question.options[index]
        text, description = option.text, option.description
        if question.kind == "predicate":
            name, default = _SIDES[text]
            if not self._head.names_options:
                return description or name
            return f"{name}: {description or default}"
        if question.kind == "score":
            level = text if description is None else f"{text}: {description}"
            return f"level {index}: {level}" if self._head.names_options else level
        if not self._head.names_options:
            return description or text
        return f"{text}: {description}" if description else text

    def _temperature(self, question: Question) -> float:
        kind, count = _KINDS[question.kind], len(question.options)
        sizes = ((2, "2"), (5, "3-5"), (10, "6-10"))
        size = next((name for most, name in sizes if count <= most), "11+")
        known = self._head.temperatures
        return known.get(f"{kind}:{size}", known.get(kind, 1.0))

    def _tokens(self, text: str, side: Side = "right") -> list[int]:
        """Return the tokens of a text, in which the mask token has no meaning."""
        plain = text.replace(self._mask_text, " ")
        return self._reader.encode([plain], Truncation(side=side), add_special_tokens=False)[0]


def _is_list(decision: Decision) -> bool:
    return isinstance(decision, SystemOneRequest) and isinstance(decision.state, list)
