"""Decision reader: the part of a decision endpoint that depends on the kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tidemill.protocol.contract import Usage
from tidemill.protocol.decisions.questions import Answer, Decision

from .endpoint import Prepared, RequestMetadata

PreparedDecision = Prepared[Any, Any]
"""A decision as requests to the engine; its context has the `decision`."""


class DecisionReader(Protocol):
    """Turns a decision into requests to the engine, and their results into answers.

    Like an endpoint's functions, these are pure and may run in any thread.
    """

    def prepare(
        self, decision: Decision, param: str, metadata: RequestMetadata
    ) -> PreparedDecision:
        """Return the requests; `param` is the input's field. Raises `RequestError`."""

    def follow_up(
        self, prepared: PreparedDecision, results: Sequence[Any]
    ) -> PreparedDecision | None:
        """Return the decision with further requests; None if it is complete."""

    def answers(self, prepared: PreparedDecision, results: Sequence[Any]) -> list[Answer]:
        """Return the answer of each question, in order."""

    def usage(self, prepared: PreparedDecision, results: Sequence[Any]) -> Usage:
        """Return the tokens that were read."""
