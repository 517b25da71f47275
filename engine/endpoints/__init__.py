"""The endpoints that are served: each is one file, and one line here."""

from __future__ import annotations

from engine.endpoints.chat import ChatCompletions
from engine.endpoints.completions import Completions
from engine.endpoints.endpoint import Endpoint
from engine.endpoints.generation import Generator, TextGeneration
from engine.text.text_model import TextModel

__all__ = ["Endpoint", "text_endpoints"]


def text_endpoints(model: TextModel, generator: Generator, *, seed: int) -> tuple[Endpoint, ...]:
    """Return the endpoints of a model that generates text; `seed` keys requests that name none."""
    generation = TextGeneration(model, generator, seed=seed)
    return (ChatCompletions(generation), Completions(generation))
