"""`/v1/responses`: items in, items out, by the model's chat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply
from tidemill.protocol.fetched_urls import has_input_images
from tidemill.protocol.requests import read_body
from tidemill.protocol.responses.events import ResponseEvents
from tidemill.protocol.responses.request import ResponsesRequest
from tidemill.protocol.responses.response import ended_body, items_of, response_body
from tidemill.protocol.routes import RESPONSES
from tidemill.protocol.stream import StreamOptions

from ..scheduling.sequence import SequenceRequest, SequenceResult
from .chat import ChatCompletions
from .chat_preprocessor import Conversation
from .endpoint import OutputDelta, Prepared, RequestMetadata, ResponseStream
from .image_inputs import PlacedUrl


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """A request for a response, and the chat that answers it."""

    request: ResponsesRequest
    chat: Prepared[SequenceRequest, Conversation]


_Prepared = Prepared[SequenceRequest, ResponseContext]


class Responses:
    """The stateless part of OpenAI's Responses API, by the chat endpoint of a model."""

    route = RESPONSES

    def __init__(self, chat: ChatCompletions) -> None:
        self._chat = chat

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        return self._chat.images.fetched(body, _images_of) if has_input_images(body) else None

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return the sequence of the response."""
        request = read_body(ResponsesRequest, body)
        with request.own_names():
            chat = self._chat.prepare_request(request.chat, body, metadata)
        return Prepared(chat.requests, ResponseContext(request, chat), metadata, chat.num_bytes)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the response with its output items."""
        reply = self._chat.finish(prepared.context.chat, results)
        [choice] = reply.body["choices"]
        body = ended_body(
            _frame(prepared),
            items_of(_name(prepared.metadata), choice),
            reply.body["usage"],
            is_truncated=choice["finish_reason"] == "length",
        )
        return Reply(200, body, reply.usage)

    def stream(self, prepared: _Prepared, options: StreamOptions) -> ResponseStream:
        """Return the stream of the response's events."""
        del options  # the last event always has the usage
        chat = self._chat.stream(prepared.context.chat, StreamOptions(include_usage=True))
        return ResponseItemStream(chat, ResponseEvents(_frame(prepared), _name(prepared.metadata)))


class ResponseItemStream:
    """A streamed response: the events of its chat's chunks."""

    def __init__(self, chat: ResponseStream, events: ResponseEvents) -> None:
        self._chat = chat
        self._events = events

    def add(self, place: int, delta: OutputDelta, result: Any) -> list[dict[str, Any]]:
        """Return the events of new output."""
        chunks = self._chat.add(place, delta, result)
        return [event for chunk in chunks for event in self._events.add(chunk)]

    def end(self) -> list[dict[str, Any]]:
        """Return the last events, with the whole response."""
        events = [event for chunk in self._chat.end() for event in self._events.add(chunk)]
        return [*events, *self._events.end()]


def _images_of(body: dict[str, Any]) -> list[PlacedUrl]:
    """Return the images of a body with images."""
    return read_body(ResponsesRequest, body).images()


def _frame(prepared: _Prepared) -> dict[str, Any]:
    """Return the response without output."""
    metadata = prepared.metadata
    return response_body(
        prepared.context.request,
        response_id("resp", metadata.request_id),
        created=metadata.created,
        model=metadata.model,
    )


def _name(metadata: RequestMetadata) -> str:
    return metadata.request_id.removeprefix("req_")
