"""Liquid d1: the next token after each question, by the prompts and labels of its training."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.contract import Usage
from tidemill.protocol.decisions.questions import Answer, Decision, Question
from tidemill.protocol.errors import RequestError
from tidemill.protocol.messages import Message

from ...parsers.registry import ParserSet
from ...scheduling.sequence import Sampling, SequenceRequest, SequenceResult
from ...text.text_model import TextModel
from ..chat_preprocessor import ChatPreprocessor
from ..endpoint import Prepared, RequestMetadata
from ..prompt_tokens import PromptTokenizer
from ..request_bounds import check_prompt_chars, check_prompt_tokens
from .next_token import usage_of
from .orders import decision_seed, mean_answers
from .published_prompts import (
    NOT_SUPPORTED,
    answer_of,
    check_count,
    question_paths,
    shown_orders,
    state_text,
    text_of,
)
from .reader import OneStepReader

LIQUID = "Lfm2VlForConditionalGeneration"
_SIDES = (("yes", "Yes", "YES"), ("no", "No", "NO"))
_MAX_LEVELS = 10


@dataclass(frozen=True, slots=True)
class LabelRead:
    """One read: a question's index, the order of its options, and the tokens of each label."""

    question: int
    order: tuple[int, ...]
    tokens: list[list[int]]


@dataclass(frozen=True, slots=True)
class LabelReads:
    """A decision with its reads."""

    decision: Decision
    reads: list[LabelRead]


_Prepared = Prepared[SequenceRequest, LabelReads]


class LiquidReader(OneStepReader):
    """A `DecisionReader` of Liquid's decision models; the best token of a label counts."""

    def __init__(self, model: TextModel, parsers: ParserSet) -> None:
        self._model = model
        self._chats = ChatPreprocessor(model, parsers)
        self._tokenizer = PromptTokenizer(model)

    def prepare(
        self, decision: Decision, param: str, metadata: RequestMetadata, body: Mapping[str, Any]
    ) -> _Prepared:
        """Return a sequence of one new token for each read."""
        del body
        state, seed = state_text(decision, _indented), decision_seed(decision)
        questions, num_tokens, num_chars = decision.parsed_questions, 0, 0
        requests, reads = [], []
        for number, (question, path) in enumerate(
            zip(questions, question_paths(decision), strict=True)
        ):
            for order in _orders(decision, number, question, seed):
                labels = _labels(question, order, path)
                prompt = self._prompt(decision, state, question, order, labels, metadata)
                num_chars += len(prompt)
                check_prompt_chars(num_chars, "questions")
                ids = self._tokenizer.encode(prompt, param, add_special_tokens=False)
                self._tokenizer.check_length(len(ids), param, num_to_come=1)
                num_tokens += len(ids)
                check_prompt_tokens(num_tokens, "questions")
                tokens = self._label_tokens(labels, path)
                requests.append(self._request(ids, tokens, decision, metadata))
                reads.append(LabelRead(number, order, tokens))
        return Prepared(requests, LabelReads(decision, reads), metadata)

    def answers(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> list[Answer]:
        """Return the answer of each question: the mean over the orders of its options."""
        return mean_answers(
            (read.question, _answer(read, result))
            for read, result in zip(prepared.context.reads, results, strict=True)
        )

    def usage(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Usage:
        """Return the usage; tokens that prompts share count once."""
        return usage_of(prepared.requests, results)

    def _prompt(  # noqa: PLR0917 - a read's parts
        self,
        decision: Decision,
        state: str,
        question: Question,
        order: Sequence[int],
        labels: Sequence[Sequence[str]],
        metadata: RequestMetadata,
    ) -> str:
        content = _ask(question, order, [forms[0] for forms in labels])
        if state:
            content = f"{state}\n\n\nQUESTION:\n{content}"
        messages = [Message(role="user", content=content)]
        if decision.instructions:
            messages.insert(0, Message(role="system", content=decision.instructions))
        request = ChatCompletionRequest.model_construct(
            messages=messages,
            chat_template_kwargs=decision.chat_template_kwargs,
            reasoning_effort="none",
        )
        return self._chats.prompt_text(request, metadata.created)

    def _label_tokens(self, labels: Sequence[Sequence[str]], path: str) -> list[list[int]]:
        """Return the tokens of each label's forms; raise `RequestError` if one has none alone."""
        tokens: list[list[int]] = []
        known: set[int] = set()
        for forms in labels:
            encoded = [
                self._model.tokenizer.encode(form, add_special_tokens=False) for form in forms
            ]
            own = list(dict.fromkeys(ids[0] for ids in encoded if len(ids) == 1))
            if len(encoded[0]) != 1 or known & set(own):
                raise RequestError(
                    f"The label {forms[0]!r} of `{path}` is not one distinct token of this model: "
                    "use fewer or other options.",
                    param=path,
                    code=NOT_SUPPORTED,
                )
            known |= set(own)
            tokens.append(own)
        return tokens

    def _request(
        self,
        ids: list[int],
        tokens: Sequence[Sequence[int]],
        decision: Decision,
        metadata: RequestMetadata,
    ) -> SequenceRequest:
        wanted = tuple(token for own in tokens for token in own)
        return SequenceRequest(
            prompt_ids=ids,
            max_tokens=1,
            sampling=Sampling(temperature=0.0, logprobs=0, logprob_token_ids=wanted),
            cache_salt=decision.cache_salt or "",
            adapter=metadata.adapter,
            request_id=metadata.request_id,
        )


def _orders(
    decision: Decision, number: int, question: Question, seed: int
) -> Sequence[tuple[int, ...]]:
    """Return the orders of a question's options; only those of a choice may change."""
    places = range(len(question.options))
    if question.kind != "choice":
        return [tuple(places)]
    return list(shown_orders(decision, number, places, seed))


def _labels(question: Question, order: Sequence[int], path: str) -> list[tuple[str, ...]]:
    """Return the forms of each label, in the order of the options shown."""
    count = len(order)
    if question.kind == "predicate":
        return list(_SIDES)
    if question.kind == "score":
        check_count(path, count, _MAX_LEVELS)
        return [(str(level),) for level in order]
    names = [question.options[option].text.strip() for option in order]
    if not all(len(name) == 1 and name.isalpha() for name in names):
        check_count(path, count, len(string.ascii_uppercase))
        names = list(string.ascii_uppercase[:count])
    return [(name, f" {name}") for name in names]


def _ask(question: Question, order: Sequence[int], labels: Sequence[str]) -> str:
    instructions = text_of(question.instructions)
    options = [question.options[option] for option in order]
    if question.kind == "predicate":
        yes, no = (option.description for option in options)
        sides = f"\nYes: {yes}\nNo: {no}" if yes or no else ""
        return f"{instructions}{sides}\n\nReply with yes or no only."
    if question.kind == "score":
        levels = [
            option.text if option.description is None else f"{option.text}: {option.description}"
            for option in options
        ]
        lines = "\n".join(f"{label} {text}" for label, text in zip(labels, levels, strict=True))
        last = len(options) - 1
        return f"{instructions}\n\n{lines}\n\nReply with a single digit 0-{last} only."
    lines = "\n".join(
        f"{label} {option.description or option.text.replace('_', ' ')}"
        for label, option in zip(labels, options, strict=True)
    )
    return f"{instructions}\n\nOptions:\n{lines}\n\nReply with the option code only."


def _answer(read: LabelRead, result: SequenceResult) -> Answer:
    """Return the softmax of the labels, each by its most likely token."""
    assert result.logprobs is not None
    [row] = result.logprobs.rows()
    assert row is not None
    logprob_of = dict(row[3])
    best = [max(logprob_of[token] for token in own) for own in read.tokens]
    mass = math.fsum(math.exp(logprob_of[token]) for own in read.tokens for token in own)
    is_label = any(result.token_ids[0] in own for own in read.tokens)
    shares = answer_of(best, read.order).probabilities
    return Answer(shares, min(1.0, mass), argmax_is_label=is_label)


def _indented(value: object) -> str:
    """Return a state as the model was trained to read it; null leaves the question alone."""
    return "" if value is None else json.dumps(value, ensure_ascii=False, indent=2)
