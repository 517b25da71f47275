"""`/v1/decisions` and `/v1/systemone`: probabilities of the options of questions about an input."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply
from tidemill.protocol.decisions.openai_body import (
    DecisionRequest,
    decision_body,
    decision_usage,
)
from tidemill.protocol.decisions.systemone_body import SystemOneRequest, systemone_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.routes import DECISIONS, SYSTEM_ONE, Route

from ..endpoint import FollowUps, RequestMetadata
from ..image_inputs import request_with_images
from .chat_reader import ChatDecision, ChatReader
from .reader import DecisionReader, PreparedDecision


class _DecisionEndpoint:
    """The part that both endpoints share."""

    kind: type[DecisionRequest | SystemOneRequest]
    param: str  # the input's field

    def __init__(self, reader: DecisionReader, chat: ChatReader | None = None) -> None:
        """Create the endpoint; a model that generates also decides by a `chat`."""
        self._reader = reader
        self._chat = chat

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        return self._reader.fetched(body, self.kind)

    def follow_up(
        self, prepared: PreparedDecision, results: Sequence[Any]
    ) -> PreparedDecision | None:
        """Add the requests that the reader needs after these results."""
        reader = self._reader_of(prepared)
        assert isinstance(reader, FollowUps)
        return reader.follow_up(prepared, results)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> PreparedDecision:
        """Return the requests that the reader needs."""
        decision = request_with_images(self.kind, body)
        reader: DecisionReader = self._reader
        if decision.decide_by == "chat":
            if self._chat is None:
                raise RequestError(
                    '`decide_by` is "chat", but this model does not generate text: omit it.',
                    param="decide_by",
                )
            reader = self._chat
        return reader.prepare(decision, self.param, metadata, body)

    def _reader_of(self, prepared: PreparedDecision) -> DecisionReader:
        is_chat = self._chat is not None and isinstance(prepared.context, ChatDecision)
        return self._chat if is_chat and self._chat is not None else self._reader


class Decisions(_DecisionEndpoint):
    """OpenAI's Decisions API."""

    route: Route = DECISIONS
    kind, param = DecisionRequest, "input"

    def finish(self, prepared: PreparedDecision, results: Sequence[Any]) -> Reply:
        """Return the answers in the order of the questions."""
        request, metadata = prepared.context.decision, prepared.metadata
        assert isinstance(request, DecisionRequest)
        reader = self._reader_of(prepared)
        usage = reader.usage(prepared, results)
        shown = decision_usage(usage, shows_cached_tokens=metadata.shows_cached_tokens)
        answers = reader.answers(prepared, results)
        body = decision_body(request, answers, model=metadata.model, usage=shown)
        return Reply(200, body, usage)


class SystemOne(_DecisionEndpoint):
    """TypeSafe's System One."""

    route: Route = SYSTEM_ONE
    kind, param = SystemOneRequest, "state"

    def finish(self, prepared: PreparedDecision, results: Sequence[Any]) -> Reply:
        """Return the answers by the names of their questions."""
        request, metadata = prepared.context.decision, prepared.metadata
        assert isinstance(request, SystemOneRequest)
        reader = self._reader_of(prepared)
        usage = reader.usage(prepared, results)
        body = systemone_body(
            request,
            reader.answers(prepared, results),
            response_id("decision", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            usage=usage,
        )
        return Reply(200, body, usage)
