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

    `name` is the url as clients are told it.
    """

    name: str
    exact: frozenset[str] = frozenset()
    suffix: str | None = None

    def matches(self, url: str) -> bool:
        """Say whether the url of a line means this endpoint."""
        return url in self.exact or (self.suffix is not None and url.endswith(self.suffix))


CHAT_COMPLETIONS = Route(
    "/v1/chat/completions", exact=frozenset({"/v1/chat/completions", "/chat/completions"})
)
COMPLETIONS = Route("/v1/completions", exact=frozenset({"/v1/completions", "/completions"}))
TRANSCRIPTIONS = Route("/v1/audio/transcriptions", exact=frozenset({"/v1/audio/transcriptions"}))
TRANSLATIONS = Route("/v1/audio/translations", exact=frozenset({"/v1/audio/translations"}))

ROUTES: tuple[Route, ...] = (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    Route("/v1/embeddings", exact=frozenset({"/v1/embeddings", "/embeddings"})),
    Route("/v1/score", suffix="/score"),
    Route("/v1/rerank", suffix="/rerank"),
    TRANSCRIPTIONS,
    TRANSLATIONS,
)

ENDPOINTS = (
    CHAT_COMPLETIONS.name,
    COMPLETIONS.name,
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
    if find_route(url) is not None:
        return RequestError(
            f"Model does not support endpoint: {shown}", param="url", code="endpoint_not_supported"
        )
    return RequestError(
        f"The url {shown} is not supported. Supported endpoints: {', '.join(endpoints)}.",
        param="url",
        code=UNKNOWN_URL,
    )
