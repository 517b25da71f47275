"""`/v1/responses`: items in, items out, by the model's chat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from tidemill.protocol.contract import Reply
from tidemill.protocol.fetched_urls import has_input_media
from tidemill.protocol.responses.events import ResponseEvents, matched_logprobs
from tidemill.protocol.responses.request import ResponsesRequest
from tidemill.protocol.responses.response import response_body
from tidemill.protocol.routes import RESPONSES
from tidemill.protocol.stream import StreamOptions

from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..scheduling.token_logprobs import NO_LOGPROBS, TokenLogprobs
from .chat import ChatCompletions
from .chat_preprocessor import Conversation
from .endpoint import OutputDelta, Prepared, RequestMetadata, ResponseStream
from .image_inputs import request_with_images


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """A request for a response, and the chat that answers it."""

    request: ResponsesRequest
    chat: Prepared[SequenceRequest, Conversation]


_Prepared = Prepared[SequenceRequest, ResponseContext]


class Responses:
    """OpenAI's Responses API without storage, by the chat endpoint of a model."""

    route = RESPONSES

    def __init__(self, chat: ChatCompletions) -> None:
        self._chat = chat

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's media; None for a body without media."""
        return (
            self._chat.images.fetched(body, ResponsesRequest, ResponsesRequest.images)
            if has_input_media(body)
            else None
        )

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return the sequence of the response."""
        request = request_with_images(ResponsesRequest, body)
        with request.own_names():
            chat = self._chat.prepare_request(request.chat, body, metadata)
        return Prepared(chat.requests, ResponseContext(request, chat), metadata, chat.num_bytes)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the response with its output items: the end of its stream."""
        reply, [result] = self._chat.finish(prepared.context.chat, results), results
        chunk = _chunk_of_text(reply)
        if chunk is not None:
            events = _events(prepared)
            events.add(chunk)
            body = events.end()[-1]["response"]
        else:
            stream = self.stream(prepared, StreamOptions())
            stream.add(0, _NewOutput(result.token_ids, result.logprobs or NO_LOGPROBS), result)
            body = stream.response(reply.body["usage"])
        if "tidemill" in reply.body:
            body["tidemill"] = reply.body["tidemill"]
        return Reply(200, body, reply.usage)

    def stream(self, prepared: _Prepared, options: StreamOptions) -> ResponseItemStream:
        """Return the stream of the response's events."""
        del options  # the last event always has the usage
        chat = self._chat.stream(prepared.context.chat, StreamOptions(include_usage=True))
        return ResponseItemStream(chat, _events(prepared))


class _NewOutput(NamedTuple):
    """New tokens of an answer, and their log-probabilities if they were requested."""

    new_token_ids: Sequence[int]
    new_logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs = NO_LOGPROBS
    part: None = None


class ResponseItemStream:
    """A streamed response: the events of its chat's chunks."""

    def __init__(self, chat: ResponseStream, events: ResponseEvents) -> None:
        self._chat = chat
        self._events = events

    def add(self, place: int, delta: OutputDelta, result: Any) -> list[dict[str, Any]]:
        """Return the events of new output.

        Tokens with log-probabilities are added one by one, so that each has the item of its text.
        """
        num_tokens = len(delta.new_logprobs)
        if not num_tokens:
            return self._events_of(self._chat.add(place, delta, result))
        events = []
        logprobs = delta.new_logprobs.part(0, num_tokens)  # one part, of which slices are cheap
        for number in range(num_tokens):
            scored = logprobs.part(number, number + 1)
            token = _NewOutput(delta.new_token_ids[number : number + 1], scored)
            is_last = number == num_tokens - 1
            events += self._events_of(self._chat.add(place, token, result if is_last else None))
        return events

    def end(self) -> list[dict[str, Any]]:
        """Return the last events, with the whole response."""
        return [*self._events_of(self._chat.end()), *self._events.end()]

    def response(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response, with this usage."""
        self._events.add({"choices": [], "usage": usage})
        response: dict[str, Any] = self._events.end()[-1]["response"]
        return response

    def _events_of(self, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for chunk in chunks for event in self._events.add(chunk)]


def _chunk_of_text(reply: Reply) -> dict[str, Any] | None:
    """Return a chat that is only a text as one chunk; None if tokens belong to other items."""
    [choice] = reply.body["choices"]
    message = choice["message"]
    if message["content"] is None or message.get("tool_calls") or reply.usage.reasoning_tokens:
        return None
    delta = {"content": message["content"]}
    logprobs = (choice["logprobs"] or {}).get("content") or ()
    matched = matched_logprobs(message["content"], logprobs)
    if matched is None and logprobs:
        return None
    shown = {**choice, "delta": delta, "logprobs": {"content": matched}}
    return {"choices": [shown], "usage": reply.body["usage"]}


def _frame(prepared: _Prepared) -> dict[str, Any]:
    """Return the response without output."""
    metadata = prepared.metadata
    return response_body(
        prepared.context.request,
        metadata.request_id,
        created=metadata.created,
        model=metadata.model,
    )


def _events(prepared: _Prepared) -> ResponseEvents:
    name = prepared.metadata.request_id.removeprefix("req_")
    return ResponseEvents(_frame(prepared), name, prepared.context.request.custom_tools)
