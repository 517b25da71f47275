"""What an endpoint is: something that has a reply to each body of one route."""

from __future__ import annotations

from typing import Any, Protocol

from engine.contract import Reply
from engine.protocol.routes import Route


class Endpoint(Protocol):
    """Turns one kind of body into sequences, and their results into the response's body."""

    @property
    def route(self) -> Route:
        """Return the urls that this endpoint answers."""

    async def reply_to(
        self, body: dict[str, Any], *, model: str, request_id: str, created: int
    ) -> Reply:
        """Answer a body that asks for `model`; raises `RequestError` for what is wrong in it.

        `created` (seconds since the epoch) is what the response body says.
        """
