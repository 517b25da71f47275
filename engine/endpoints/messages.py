"""What the choices of a chat say: results read, and shown as the messages of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.answers.answer import Answer, read
from engine.endpoints.choices import Choice
from engine.endpoints.conversations import Conversation
from engine.endpoints.logprobs import TextOffsets, chat_logprobs
from engine.protocol.chat import ChatCompletionRequest, chat_choice, message_body
from engine.text.tokenizer import Tokenizer


def answer_of(index: int, choice: Choice, conversation: Conversation) -> Answer:
    """Return what the choice of that number says."""
    return read(conversation.reading.reader(index), choice.text)


def thinking_tokens(
    choices: Sequence[Choice],
    answers: Sequence[Answer],
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> int | None:
    """Return how many tokens of all choices are thinking; None of a model that does not think."""
    if not conversation.reading.thinks:
        return None
    return sum(
        num_thinking_tokens(choice.result.token_ids, answer.thinking, conversation, tokenizer)
        for choice, answer in zip(choices, answers, strict=True)
    )


def num_thinking_tokens(
    token_ids: Sequence[int],
    thinking: Sequence[tuple[int, int]],
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> int:
    """Return how many tokens of a choice begin where its text is thinking, marks among them."""
    if not thinking:
        return 0
    offsets = TextOffsets(
        tokenizer,
        skip_special_tokens=conversation.request.skip_special_tokens is not False,
        markers=conversation.reading.markers,
    ).of(token_ids)
    return sum(any(start <= offset < end for start, end in thinking) for offset in offsets)


def shown_choice(
    index: int,
    choice: Choice,
    answer: Answer,
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Return a finished choice as a response shows it."""
    request, result = conversation.request, choice.result
    logprobs = None
    if request.logprobs:
        as_ids = bool(request.return_tokens_as_token_ids)
        logprobs = chat_logprobs(result.logprobs or [], tokenizer, as_ids=as_ids)
    shown = chat_choice(
        index,
        message_body(
            echoed(request) + answer.content,
            reasoning=answer.reasoning if shows_reasoning(conversation) else None,
            calls=[(call.call_id, call.name, call.arguments) for call in answer.calls],
        ),
        logprobs=logprobs,
        finish_reason=finish_reason(result.finish_reason, has_calls=bool(answer.calls)),
        stop_reason=choice.stop_reason,
        warnings=answer.warnings,
    )
    if request.return_token_ids:
        shown["token_ids"] = result.token_ids
    return shown


def shows_reasoning(conversation: Conversation) -> bool:
    """Say whether answers show what the model thought."""
    return conversation.reading.thinks and conversation.request.include_reasoning is not False


def finish_reason(ended_by: str, *, has_calls: bool) -> str:
    """Return why a choice ended: calls are what a model stops for."""
    return "tool_calls" if has_calls and ended_by == "stop" else ended_by


def echoed(request: ChatCompletionRequest) -> str:
    """Return what `echo` puts before the answer: the assistant's message that it goes on with."""
    last = request.messages[-1]
    return "\n".join(last.texts()) if request.echo and last.role == "assistant" else ""
