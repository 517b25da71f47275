"""The seam between lines and an engine: a request in, a reply out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that one reply cost; `cached_tokens` of the prompt were already in the KV cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request: HTTP status, body (`{"error": …}` when it failed), tokens.

    `bare_message` is set for the two failures that vLLM's dialect prints as a plain string
    (stream mode and an unknown url).
    """

    status_code: int
    body: dict[str, Any]
    usage: Usage = Usage()
    bare_message: bool = False


class Responder(Protocol):
    """Anything that answers requests: the engine behind its endpoints, or a scripted stand-in."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer one request; never raises for what the request holds.

        Raises `EngineError` when nothing can be answered any more.
        `request_id` also keys the randomness of a request that names no seed. `created` (seconds
        since the epoch) is the time that the reply carries and that a template may ask for.
        """
