"""Which urls mean which endpoint, whatever model is served.

A url that stands in the table but that the model cannot serve is told apart from one that nobody
knows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.protocol.errors import RequestError
from engine.protocol.validation import printable

UNKNOWN_URL = "invalid_url"

_MAX_URL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Route:
    """Which urls an endpoint answers: those listed, or all that end in the suffix.

    `name` is the url as clients are told it, `needs` the kind of model that answers it.
    """

    name: str
    needs: str
    exact: frozenset[str] = frozenset()
    suffix: str | None = None

    def matches(self, url: str) -> bool:
        """Say whether the url of a line means this endpoint."""
        return url in self.exact or (self.suffix is not None and url.endswith(self.suffix))


_WRITES = "a model that writes text"
_SCORES = "a reranker, or a model that gives vectors"
_HEARS = "a model that writes down speech"

CHAT_COMPLETIONS = Route(
    "/v1/chat/completions", _WRITES, exact=frozenset({"/v1/chat/completions", "/chat/completions"})
)
COMPLETIONS = Route(
    "/v1/completions", _WRITES, exact=frozenset({"/v1/completions", "/completions"})
)
EMBEDDINGS = Route(
    "/v1/embeddings",
    "a model that gives vectors",
    exact=frozenset({"/v1/embeddings", "/embeddings"}),
)
SCORE = Route("/v1/score", _SCORES, suffix="/score")
RERANK = Route("/v1/rerank", _SCORES, suffix="/rerank")
TRANSCRIPTIONS = Route(
    "/v1/audio/transcriptions", _HEARS, exact=frozenset({"/v1/audio/transcriptions"})
)
TRANSLATIONS = Route("/v1/audio/translations", _HEARS, exact=frozenset({"/v1/audio/translations"}))

TOKENIZE = Route("/tokenize", _WRITES, exact=frozenset({"/tokenize"}))
DETOKENIZE = Route("/detokenize", _WRITES, exact=frozenset({"/detokenize"}))

ROUTES: tuple[Route, ...] = (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    SCORE,
    RERANK,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)

ENDPOINTS = (
    CHAT_COMPLETIONS.name,
    COMPLETIONS.name,
    EMBEDDINGS.name,
    SCORE.name,
    RERANK.name,
    TRANSCRIPTIONS.name,
    TRANSLATIONS.name,
)
"""What an engine here answers, so what may be offered."""


def find_route(url: str) -> Route | None:
    """Return the route of the table that answers a url, or None for a url that nobody knows."""
    return next((route for route in ROUTES if route.matches(url)), None)


def known_route(url: str, endpoints: Collection[str] = ENDPOINTS) -> Route:
    """Return the route of a url; raises a `RequestError` that offers `endpoints` if it has none."""
    route = find_route(url)
    if route is None:
        raise not_served(url, endpoints)
    return route


def served_route(url: str, endpoints: Collection[str] = ENDPOINTS) -> Route:
    """Return the route of a url; raises `RequestError` unless it is that of one of `endpoints`."""
    route = find_route(url)
    if route is None or route.name not in endpoints:
        raise not_served(url, endpoints)
    return route


def not_served(url: str, endpoints: Collection[str]) -> RequestError:
    """Return the error of a url that none of `endpoints` answers: other models do, or nothing."""
    shown = printable(url, _MAX_URL_CHARS)
    served = ", ".join(endpoints)
    route = find_route(url)
    if route is not None:
        return RequestError(
            f"Model does not support endpoint: {shown}. It takes {route.needs}; this one serves "
            f"{served}.",
            param="url",
            code="endpoint_not_supported",
        )
    return RequestError(
        f"The url {shown} is not supported. Supported endpoints: {served}.",
        param="url",
        code=UNKNOWN_URL,
    )
