"""Decisions by a chat: one generated answer, constrained to the options of all questions.

The model may reason first. The probabilities are those of the options where the answer states
them, among the options alone: the distribution that a chat's `confidence` has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from tidemill.protocol.contract import Usage
from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.decisions.questions import Answer, Decision, Image, Part, Question, merged
from tidemill.protocol.decisions.systemone_body import SystemOneRequest
from tidemill.protocol.errors import RequestError

from ...scheduling.sequence import SequenceRequest, SequenceResult
from ..chat import ChatCompletions
from ..chat_preprocessor import Conversation
from ..endpoint import Prepared, RequestMetadata
from ..image_inputs import FETCHED

CLOSED_BUDGET = 0
"""Tokens of reasoning of a chat with no effort."""
_NO_TEMPLATE = (
    "This model has no chat template, so it cannot decide by a chat: pass `--chat-template`, or"
    " omit `decide_by`."
)
_ASK = "Answer with a JSON object that has the text of one option for each question number."


@dataclass(frozen=True, slots=True)
class ChatDecision:
    """A decision, and the chat that answers it."""

    decision: Decision
    chat: Prepared[SequenceRequest, Conversation]


_Prepared = Prepared[SequenceRequest, ChatDecision]


class ChatReader:
    """A `DecisionReader` of a generation model, which lets its chat answer.

    A model that `may_reason` has marks of reasoning.
    """

    def __init__(self, chat: ChatCompletions, *, may_reason: bool) -> None:
        self._chat = chat
        self._may_reason = may_reason

    def fetched(
        self, body: dict[str, Any], kind: type[DecisionRequest | SystemOneRequest]
    ) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return None: the model's other reader fetches the images of all bodies."""

    def prepare(
        self, decision: Decision, param: str, metadata: RequestMetadata, body: Mapping[str, Any]
    ) -> _Prepared:
        """Return the chat's sequence; `param` is the input's field."""
        if (decision.debias or 1) > 1:
            raise RequestError(
                '`debias` is not supported with `decide_by: "chat"`, which shows the options once:'
                " omit it.",
                param="debias",
            )
        try:
            chat = self._chat.prepare(self._chat_body(decision, body), metadata)
        except RequestError as exc:
            if exc.code == "chat_template_missing":
                raise RequestError(_NO_TEMPLATE, param="decide_by", code=exc.code) from exc
            is_about_input = exc.param is None or exc.param.startswith("messages")
            exc.param = param if is_about_input else exc.param
            raise
        return Prepared(
            chat.requests,
            ChatDecision(decision, chat),
            metadata,
            chat.num_bytes,
            may_follow=chat.may_follow,
        )

    def follow_up(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> _Prepared | None:
        """Add the reads that the probabilities of the options need."""
        chat = self._chat.follow_up(prepared.context.chat, results)
        if chat is None:
            return None
        context = replace(prepared.context, chat=chat)
        return replace(prepared, requests=chat.requests, context=context)

    def answers(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> list[Answer]:
        """Return the answer of each question; raises `RequestError` for a truncated one."""
        reply = self._chat.finish(prepared.context.chat, results)
        choice = reply.body["choices"][0]
        fields = choice["confidence"]
        if fields is None:
            may_reason = self._may_reason and prepared.context.decision.reasoning_effort != "none"
            other = ', or set `reasoning_effort` to "none"' if may_reason else ""
            raise RequestError(
                "The answer reached the token limit before it was complete: raise "
                f"`max_completion_tokens`{other}.",
                param="max_completion_tokens",
                code="answer_truncated",
            )
        values = json.loads(choice["message"]["content"])
        return [
            _answer(question, values[str(number)], fields[f"/{number}"])
            for number, question in enumerate(prepared.context.decision.parsed_questions, 1)
        ]

    def usage(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Usage:
        """Return the tokens of the chat, those of its reasoning included."""
        return self._chat.usage(prepared.context.chat, results)

    def _chat_body(self, decision: Decision, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the chat, with the fetched images of the decision's `body`.

        Some templates open the reasoning whatever the effort is: a budget closes it.
        """
        is_closed = self._may_reason and decision.reasoning_effort == "none"
        budget = {"thinking_token_budget": CLOSED_BUDGET} if is_closed else {}
        return _chat_body(decision, body) | budget


def _chat_body(decision: Decision, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat without a budget of its reasoning."""
    properties = {
        str(number): {"enum": list(dict.fromkeys(option.text for option in question.options))}
        for number, question in enumerate(decision.parsed_questions, 1)
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    chosen = {
        "max_completion_tokens": decision.max_completion_tokens,
        "reasoning_effort": decision.reasoning_effort,
        "chat_template_kwargs": decision.chat_template_kwargs,
        "cache_salt": decision.cache_salt,
        FETCHED: body.get(FETCHED),
    }
    return {
        "messages": [{"role": "user", "content": _message(merged(_content(decision)))}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answers", "schema": schema},
        },
        "temperature": 0,
        "confidence": True,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def _message(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    [first, *others] = parts
    if isinstance(first, str) and not others:
        return first
    return [_part(part) for part in parts]


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.url}}
    return {"type": "text", "text": part}


def _content(decision: Decision) -> Iterator[Part]:
    if decision.instructions:
        yield f"{decision.instructions}\n\n"
    if decision.question_layout == "questions_first":
        yield from _questions(decision)
        yield "Input:\n"
        yield from decision.state_parts
        yield "\n\n"
    else:
        yield from decision.state_parts
        yield "\n\n"
        yield from _questions(decision)
    yield _ASK


def _questions(decision: Decision) -> Iterator[Part]:
    for number, question in enumerate(decision.parsed_questions, 1):
        yield f"Question {number}: "
        yield from question.instructions
        for option in question.options:
            described = f" ({option.description})" if option.description else ""
            yield f"\n- {option.text}{described}"
        yield "\n\n"


def _answer(question: Question, value: str, field: Mapping[str, Any]) -> Answer:
    """Return the answer with the probabilities of a value's field.

    The mass that leads to several options is divided equally between them. If only the confidence
    of the chosen option is known, so is the rest between all others.
    """
    texts = [option.text for option in question.options]
    shares = dict.fromkeys(texts, 0.0)
    if "probabilities" in field:
        for each in field["probabilities"]:
            shares[each["value"]] = each["probability"]
        undecided = [(each["values"], each["probability"]) for each in field.get("undecided", ())]
    else:
        confidence = 1.0 if field["confidence"] is None else field["confidence"]
        shares[value] = confidence
        others = [text for text in texts if text != value]
        undecided = [(others, 1 - confidence)] if others else []
    for values, mass in undecided:
        for each in values:
            shares[each] += mass / len(values)
    total = sum(shares.values())
    return Answer(tuple(shares[text] / total for text in texts))
