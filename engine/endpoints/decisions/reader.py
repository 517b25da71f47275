"""Decision reader: the part of a decision endpoint that depends on the kind of model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from tidemill.protocol.contract import Usage
from tidemill.protocol.decisions.openai_body import DecisionRequest
from tidemill.protocol.decisions.questions import Answer, Decision
from tidemill.protocol.decisions.systemone_body import SystemOneRequest

from ..endpoint import Prepared, RequestMetadata

PreparedDecision = Prepared[Any, Any]
"""A decision as requests to the engine; its context has the `decision`."""


class DecisionReader(Protocol):
    """Turns a decision into requests to the engine, and their results into answers.

    Like an endpoint's functions, these are pure and may run in any thread. If what it prepares
    `may_follow`, it also has `FollowUps`.
    """

    def fetched(
        self, body: dict[str, Any], kind: type[DecisionRequest | SystemOneRequest]
    ) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""

    def prepare(
        self, decision: Decision, param: str, metadata: RequestMetadata, body: Mapping[str, Any]
    ) -> PreparedDecision:
        """Return the requests; `param` is the input's field. Raises `RequestError`.

        `body` contains the fetched images.
        """

    def answers(self, prepared: PreparedDecision, results: Sequence[Any]) -> list[Answer]:
        """Return the answer of each question, in order."""

    def usage(self, prepared: PreparedDecision, results: Sequence[Any]) -> Usage:
        """Return the tokens that were read."""


class OneStepReader:
    """Base of readers of text whose first requests complete a decision."""

    def fetched(
        self, body: dict[str, Any], kind: type[DecisionRequest | SystemOneRequest]
    ) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return None: `prepare` rejects images."""

    def usage(self, prepared: PreparedDecision, results: Sequence[Any]) -> Usage:
        """Return the usage: the tokens of all prompts."""
        del prepared
        return Usage(prompt_tokens=sum(result.num_tokens for result in results))
