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
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import DECISIONS, SYSTEM_ONE, Route

from ..endpoint import FollowUps, RequestMetadata
from .reader import DecisionReader, PreparedDecision


class _DecisionEndpoint:
    """The part that both endpoints share."""

    kind: type[DecisionRequest | SystemOneRequest]
    param: str  # the input's field

    def __init__(self, reader: DecisionReader) -> None:
        self._reader = reader

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        return self._reader.fetched(body, self.kind)

    def follow_up(
        self, prepared: PreparedDecision, results: Sequence[Any]
    ) -> PreparedDecision | None:
        """Add the requests that the reader needs after these results."""
        assert isinstance(self._reader, FollowUps)
        return self._reader.follow_up(prepared, results)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> PreparedDecision:
        """Return the requests that the reader needs."""
        return self._reader.prepare(read_body(self.kind, body), self.param, metadata, body)


class Decisions(_DecisionEndpoint):
    """OpenAI's Decisions API."""

    route: Route = DECISIONS
    kind, param = DecisionRequest, "input"

    def finish(self, prepared: PreparedDecision, results: Sequence[Any]) -> Reply:
        """Return the answers in the order of the questions."""
        request, metadata = prepared.context.decision, prepared.metadata
        assert isinstance(request, DecisionRequest)
        usage = self._reader.usage(prepared, results)
        cached = usage.cached_tokens if metadata.shows_cached_tokens else 0
        body = decision_body(
            request,
            self._reader.answers(prepared, results),
            model=metadata.model,
            usage=decision_usage(usage.prompt_tokens, cached),
        )
        return Reply(200, body, usage)


class SystemOne(_DecisionEndpoint):
    """TypeSafe's System One."""

    route: Route = SYSTEM_ONE
    kind, param = SystemOneRequest, "state"

    def finish(self, prepared: PreparedDecision, results: Sequence[Any]) -> Reply:
        """Return the answers by the names of their questions."""
        request, metadata = prepared.context.decision, prepared.metadata
        assert isinstance(request, SystemOneRequest)
        usage = self._reader.usage(prepared, results)
        body = systemone_body(
            request,
            self._reader.answers(prepared, results),
            response_id("decision", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            input_tokens=usage.prompt_tokens,
        )
        return Reply(200, body, usage)
