"""What the choices of a chat say: results read, and shown as the messages of a response."""

from __future__ import annotations

from typing import Any

from engine.answers.answer import Answer, read
from engine.endpoints.choices import Choice
from engine.endpoints.conversations import Conversation
from engine.endpoints.logprobs import chat_logprobs
from engine.protocol.chat import ChatCompletionRequest, chat_choice
from engine.text.tokenizer import Tokenizer


def answer_of(index: int, choice: Choice, conversation: Conversation) -> Answer:
    """Return what the choice of that number says."""
    return read(conversation.reading.reader(index), choice.text)


def shown_choice(
    index: int, choice: Choice, conversation: Conversation, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return a finished choice as a response shows it."""
    request, result = conversation.request, choice.result
    answer = answer_of(index, choice, conversation)
    logprobs = None
    if request.logprobs:
        as_ids = bool(request.return_tokens_as_token_ids)
        logprobs = chat_logprobs(result.logprobs or [], tokenizer, as_ids=as_ids)
    shown = chat_choice(
        index,
        echoed(request) + answer.content,
        logprobs=logprobs,
        finish_reason=result.finish_reason,
        stop_reason=choice.stop_reason,
    )
    if request.return_token_ids:
        shown["token_ids"] = result.token_ids
    return shown


def echoed(request: ChatCompletionRequest) -> str:
    """Return what `echo` puts before the answer: the assistant's message that it goes on with."""
    last = request.messages[-1]
    return "\n".join(last.texts()) if request.echo and last.role == "assistant" else ""
