"""Messages of chat responses: choices parsed into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.protocol.chat import ChatCompletionRequest, chat_choice, message_body

from ..parsers.json_text import is_closed
from ..parsers.parsed_output import ParsedMessage, parse_text
from ..scheduling.token_logprobs import NO_LOGPROBS
from ..text.tokenizer import Tokenizer
from .chat_preprocessor import Conversation
from .choices import FinishedChoice
from .logprob_bodies import TextOffsets, chat_logprobs


def parse_choice(index: int, choice: FinishedChoice, conversation: Conversation) -> ParsedMessage:
    """Return the parsed message of a choice."""
    return parse_text(conversation.parser.for_choice(index), choice.text)


def count_reasoning_tokens(
    choices: Sequence[FinishedChoice],
    answers: Sequence[ParsedMessage],
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> int | None:
    """Return the reasoning tokens of all choices; None for a model without reasoning."""
    if not conversation.parser.has_reasoning:
        return None
    return sum(
        num_reasoning_tokens(
            choice.result.token_ids, answer.reasoning_spans, conversation, tokenizer
        )
        for choice, answer in zip(choices, answers, strict=True)
    )


def num_reasoning_tokens(
    token_ids: Sequence[int],
    reasoning_spans: Sequence[tuple[int, int]],
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> int:
    """Return the number of tokens that begin within a choice's reasoning, marks included."""
    if not reasoning_spans:
        return 0
    offsets = TextOffsets(
        tokenizer,
        skip_special_tokens=conversation.request.skip_special_tokens is not False,
        markers=conversation.parser.markers,
    ).next_offsets(token_ids)
    return sum(any(start <= offset < end for start, end in reasoning_spans) for offset in offsets)


def choice_body(
    index: int,
    choice: FinishedChoice,
    answer: ParsedMessage,
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Return the body of a finished choice."""
    request, result = conversation.request, choice.result
    logprobs = None
    if request.logprobs:
        as_ids = bool(request.return_tokens_as_token_ids)
        logprobs = chat_logprobs(result.logprobs or NO_LOGPROBS, tokenizer, as_ids=as_ids)
    shown = chat_choice(
        index,
        message_body(
            echoed_text(request) + answer.content,
            reasoning=answer.reasoning if shows_reasoning(conversation) else None,
            fields=conversation.reasoning_fields,
            calls=[(call.call_id, call.name, call.arguments) for call in answer.calls],
            custom_tools=request.custom_tools if answer.calls else (),
        ),
        logprobs=logprobs,
        finish_reason=finish_reason(
            result.finish_reason, answer.calls[-1].arguments if answer.calls else None
        ),
        stop_reason=choice.stop_reason,
        warnings=[*(request.notes if request.is_constrained else ()), *answer.warnings],
    )
    if request.return_token_ids:
        shown["token_ids"] = result.token_ids
    return shown


def shows_reasoning(conversation: Conversation) -> bool:
    """Return whether answers show the model's reasoning."""
    return conversation.parser.has_reasoning and conversation.request.include_reasoning is not False


def finish_reason(ended_by: str, last_arguments: str | None) -> str:
    """Return a choice's finish reason: `tool_calls` for one that stopped after a finished call."""
    is_called = last_arguments is not None and ended_by == "stop" and is_closed(last_arguments)
    return "tool_calls" if is_called else ended_by


def echoed_text(request: ChatCompletionRequest) -> str:
    """Return the text that `echo` prepends: the assistant message that the answer continues."""
    last = request.messages[-1]
    return "\n".join(last.texts()) if request.echo and last.role == "assistant" else ""
