"""Routes: URLs of the endpoints, independent of the served model.

A known endpoint that the model does not support and an unknown URL have different errors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .validation import printable

UNKNOWN_URL = "invalid_url"

_MAX_URL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Route:
    """URLs of an endpoint: a fixed list, or all URLs with the suffix.

    `name` is the URL in messages and docs, `needs` the kind of model that it requires.
    """

    name: str
    needs: str
    exact: frozenset[str] = frozenset()
    suffix: str | None = None

    def matches(self, url: str) -> bool:
        """Say whether a line's URL is one of this endpoint."""
        return url in self.exact or (self.suffix is not None and url.endswith(self.suffix))


_WRITES = "a text generation model"
_SCORES = "a reranker or an embedding model"
_LABELS = "a classifier"
_DECIDES = "a text generation or decision model"
_HEARS = "a speech recognition model"

CHAT_COMPLETIONS = Route(
    "/v1/chat/completions", _WRITES, exact=frozenset({"/v1/chat/completions", "/chat/completions"})
)
RESPONSES = Route("/v1/responses", _WRITES, exact=frozenset({"/v1/responses", "/responses"}))
COMPLETIONS = Route(
    "/v1/completions", _WRITES, exact=frozenset({"/v1/completions", "/completions"})
)
EMBEDDINGS = Route(
    "/v1/embeddings",
    "an embedding model",
    exact=frozenset({"/v1/embeddings", "/embeddings"}),
)
COHERE_EMBED = Route("/v2/embed", "an embedding model", exact=frozenset({"/v2/embed"}))
GENERATIVE_SCORING = Route(
    "/v1/generative_scoring",
    _WRITES,
    exact=frozenset({"/v1/generative_scoring", "/generative_scoring"}),
)
DECISIONS = Route("/v1/decisions", _DECIDES, exact=frozenset({"/v1/decisions", "/decisions"}))
SYSTEM_ONE = Route("/v1/systemone", _DECIDES, exact=frozenset({"/v1/systemone", "/systemone"}))
SCORE = Route("/v1/score", _SCORES, suffix="/score")
RERANK = Route("/v1/rerank", _SCORES, suffix="/rerank")
CLASSIFY = Route("/v1/classify", _LABELS, exact=frozenset({"/v1/classify", "/classify"}))
MODERATIONS = Route(
    "/v1/moderations",
    f"{_LABELS} with named labels, or a guard model with a known chat template",
    exact=frozenset({"/v1/moderations", "/moderations"}),
)
POOLING = Route(
    "/pooling", "an embedding model or a classifier", exact=frozenset({"/pooling", "/v1/pooling"})
)
TRANSCRIPTIONS = Route(
    "/v1/audio/transcriptions", _HEARS, exact=frozenset({"/v1/audio/transcriptions"})
)
TRANSLATIONS = Route(
    "/v1/audio/translations",
    "a multilingual speech model (English-only ones, such as whisper-tiny.en, do not translate)",
    exact=frozenset({"/v1/audio/translations"}),
)

TOKENIZE = Route("/tokenize", _WRITES, exact=frozenset({"/tokenize"}))
DETOKENIZE = Route("/detokenize", _WRITES, exact=frozenset({"/detokenize"}))
TOKENIZER_INFO = Route("/tokenizer_info", _WRITES, exact=frozenset({"/tokenizer_info"}))

ROUTES: tuple[Route, ...] = (
    CHAT_COMPLETIONS,
    RESPONSES,
    COMPLETIONS,
    GENERATIVE_SCORING,
    DECISIONS,
    SYSTEM_ONE,
    EMBEDDINGS,
    COHERE_EMBED,
    SCORE,
    RERANK,
    CLASSIFY,
    MODERATIONS,
    POOLING,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)

ENDPOINTS = tuple(route.name for route in ROUTES)
"""Names of all endpoints that engines support."""


URLS_OF_FIELDS: dict[str, tuple[Route, ...]] = {
    "file_url": (TRANSCRIPTIONS, TRANSLATIONS),
    "messages": (CHAT_COMPLETIONS, EMBEDDINGS, CLASSIFY, POOLING),
    "prompt": (COMPLETIONS,),
    "state": (SYSTEM_ONE,),
    "questions": (DECISIONS,),
    "instructions": (RESPONSES,),
    "max_output_tokens": (RESPONSES,),
    "input": (EMBEDDINGS, RESPONSES, CLASSIFY, MODERATIONS, POOLING),
    "texts": (COHERE_EMBED,),
    "inputs": (COHERE_EMBED,),
    "label_token_ids": (GENERATIVE_SCORING,),
    "query": (RERANK,),
    "text_1": (SCORE,),
    "data_1": (SCORE,),
    "queries": (SCORE,),
}
"""Endpoints of a body without a URL by a field that only their bodies have, likelier ones first."""


def url_of_body(body: Mapping[str, Any], url: str | None = None) -> str | None:
    """Return the endpoint of a body by its fields, or `url` if the body can belong to it.

    A field that is null does not count, except a state; a body without any of the fields has `url`.
    """
    given = {name for name, value in body.items() if value is not None or name == "state"}
    found = [routes for name, routes in URLS_OF_FIELDS.items() if name in given]
    route = find_route(url or "")
    if route is None or not found:
        return found[0][0].name if found else url
    is_stored_prompt = route is RESPONSES and isinstance(body.get("prompt"), dict)
    is_own = is_stored_prompt or any(route in routes for routes in found)
    return route.name if is_own else found[0][0].name


def find_route(url: str) -> Route | None:
    """Return the route of a URL, or None for an unknown URL."""
    return next((route for route in ROUTES if route.matches(url)), None)


def known_route(url: str, endpoints: Collection[str] = ENDPOINTS) -> Route:
    """Return the route of a URL; raises a `RequestError` that lists `endpoints` if unknown."""
    route = find_route(url)
    if route is None:
        raise not_served(url, endpoints)
    return route


def served_route(url: str, endpoints: Collection[str] = ENDPOINTS) -> Route:
    """Return the route of a URL; raises `RequestError` unless it is one of `endpoints`."""
    route = find_route(url)
    if route is None or route.name not in endpoints:
        raise not_served(url, endpoints)
    return route


def not_served(url: str, endpoints: Collection[str]) -> RequestError:
    """Return the error for a URL outside `endpoints`: unknown, or of other models only."""
    shown = printable(url, _MAX_URL_CHARS)
    served = ", ".join(endpoints)
    route = find_route(url)
    if route is not None:
        return RequestError(
            f"Model does not support endpoint: {shown}. It requires {route.needs}; this model "
            f"supports {served}.",
            param="url",
            code="endpoint_not_supported",
        )
    return RequestError(
        f"The URL {shown} is not supported. Supported endpoints: {served}.",
        param="url",
        code=UNKNOWN_URL,
    )
