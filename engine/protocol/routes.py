"""What an endpoint is: a rule for urls, and something that answers their bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.responder import Reply


@dataclass(frozen=True, slots=True)
class Route:
    """Which urls an endpoint answers: those listed, or all that end in the suffix.

    `name` is the url as clients are told it.
    """

    name: str
    exact: frozenset[str] = frozenset()
    suffix: str | None = None

    def matches(self, url: str) -> bool:
        """Say whether the url of a line means this endpoint."""
        return url in self.exact or (self.suffix is not None and url.endswith(self.suffix))


class Endpoint(Protocol):
    """Turns one kind of body into sequences, and their results into the response's body."""

    @property
    def route(self) -> Route:
        """Return the urls that this endpoint answers."""

    async def respond(self, body: dict[str, Any], *, model: str, request_id: str) -> Reply:
        """Answer a body that asks for `model`; raises `RequestError` for what is wrong in it."""
