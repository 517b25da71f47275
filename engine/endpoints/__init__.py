"""The table of endpoints: each is one file, and one line here.

A url that stands in the table but that the model cannot serve is told apart from one that nobody
knows.
"""

from __future__ import annotations

from engine.endpoints import chat, completions
from engine.endpoints.chat import ChatCompletions
from engine.endpoints.completions import Completions
from engine.endpoints.generation import TextGeneration
from engine.endpoints.route import Endpoint, Route
from engine.generator import Generator
from engine.text.model import TextModel

__all__ = ["ROUTES", "Endpoint", "Route", "find_route", "text_endpoints"]

ROUTES: tuple[Route, ...] = (
    chat.ROUTE,
    completions.ROUTE,
    Route("/v1/embeddings", exact=frozenset({"/v1/embeddings", "/embeddings"})),
    Route("/v1/score", suffix="/score"),
    Route("/v1/rerank", suffix="/rerank"),
    Route("/v1/audio/transcriptions", exact=frozenset({"/v1/audio/transcriptions"})),
    Route("/v1/audio/translations", exact=frozenset({"/v1/audio/translations"})),
)


def find_route(url: str) -> Route | None:
    """Return the route of the table that answers a url, or None for a url that nobody knows."""
    return next((route for route in ROUTES if route.matches(url)), None)


def text_endpoints(
    model: TextModel, generator: Generator, *, created: int, seed: int
) -> tuple[Endpoint, ...]:
    """Return the endpoints of a model that generates text.

    `created` (seconds since the epoch) is what every response body of the job says; `seed` keys
    the requests that name none.
    """
    generation = TextGeneration(model, generator, seed=seed)
    return (
        ChatCompletions(generation, created=created),
        Completions(generation, created=created),
    )
