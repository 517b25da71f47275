"""Request validation that needs no model: parameters, body and the errors for both.

An engine responds with these errors; a file check before loading the engine predicts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel

from .audio import TranscriptionRequest, TranslationRequest
from .chat import ChatCompletionRequest
from .classification import ClassificationRequest
from .cohere_embed import CohereEmbedRequest
from .completions import CompletionRequest
from .decisions.openai_body import DecisionRequest
from .decisions.questions import MAX_ORDERS
from .decisions.systemone_body import SystemOneRequest
from .embeddings import EmbeddingRequest
from .fields import MAX_CHOICES, MAX_PRIORITY
from .moderation import ModerationRequest
from .names import name_of_model
from .pooling import PoolRequest
from .responses.request import ResponsesRequest
from .routes import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COHERE_EMBED,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    ENDPOINTS,
    GENERATIVE_SCORING,
    MODERATIONS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    SYSTEM_ONE,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    Route,
    served_route,
)
from .scoring import GenerativeScoringRequest, RerankRequest, ScoreRequest
from .stream import refuse_stream
from .unsupported import (
    CHAT,
    COHERE,
    DECISION,
    GENERATION,
    LABELS,
    MODERATION,
    POOL,
    RESPONSE,
    SCORES,
    SYSTEM_ONE_BODY,
    TRANSCRIPTION,
    TRANSLATION,
    VECTORS,
)
from .validation import NeutralValues, parse, refuse_unsupported

PROMPT_FIELDS = (
    *("messages", "prompt", "input", "state", "texts", "inputs"),
    *("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
)
"""Body fields that contain the model's input, except audio."""

PROMPT_NAMES = frozenset({*PROMPT_FIELDS, "file"})
"""Body fields that contain the model's input."""

# Fields of all endpoints with a list of about one sequence per item.
_SEQUENCE_LISTS = (
    "prompt",
    "input",
    "texts",
    "inputs",
    "documents",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
    "queries",
    "items",
)

_FAST_TIERS = ("priority", "fast", "ultrafast")
_MAX_CACHED_CHARS = 256
_cached_route = lru_cache(maxsize=64)(served_route)

_Request = TypeVar("_Request", bound=BaseModel)

_REQUESTS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        CHAT_COMPLETIONS.name: ChatCompletionRequest,
        RESPONSES.name: ResponsesRequest,
        COMPLETIONS.name: CompletionRequest,
        GENERATIVE_SCORING.name: GenerativeScoringRequest,
        DECISIONS.name: DecisionRequest,
        SYSTEM_ONE.name: SystemOneRequest,
        EMBEDDINGS.name: EmbeddingRequest,
        COHERE_EMBED.name: CohereEmbedRequest,
        RERANK.name: RerankRequest,
        CLASSIFY.name: ClassificationRequest,
        MODERATIONS.name: ModerationRequest,
        POOLING.name: PoolRequest,
        TRANSCRIPTIONS.name: TranscriptionRequest,
        TRANSLATIONS.name: TranslationRequest,
    }
)
_NEUTRAL_VALUES: Mapping[type[BaseModel], NeutralValues] = MappingProxyType(
    {
        ChatCompletionRequest: CHAT,
        ResponsesRequest: RESPONSE,
        EmbeddingRequest: VECTORS,
        CohereEmbedRequest: COHERE,
        ScoreRequest: SCORES,
        RerankRequest: SCORES,
        ClassificationRequest: LABELS,
        ModerationRequest: MODERATION,
        PoolRequest: POOL,
        GenerativeScoringRequest: SCORES,
        DecisionRequest: DECISION,
        SystemOneRequest: SYSTEM_ONE_BODY,
        TranscriptionRequest: TRANSCRIPTION,
        TranslationRequest: TRANSLATION,
    }
)


def request_types(route: Route) -> tuple[type[BaseModel], ...]:
    """Return the types that an endpoint's body may be parsed as."""
    if route is RESPONSES:
        return (ResponsesRequest, ChatCompletionRequest)
    return (ScoreRequest, RerankRequest) if route is SCORE else (_REQUESTS[route.name],)


def neutral_values(kind: type[BaseModel]) -> NeutralValues:
    """Return the unsupported parameters of a type of request, with their neutral values."""
    return _NEUTRAL_VALUES.get(kind, GENERATION)


def read_body(kind: type[_Request], body: Mapping[str, Any]) -> _Request:
    """Return a body parsed as a request of its endpoint.

    Raises `RequestError` for an unsupported parameter or an invalid body.
    """
    refuse_unsupported(body, neutral_values(kind))
    return parse(kind, body)


def read_score(body: Mapping[str, Any]) -> ScoreRequest | RerankRequest:
    """Return a body at `/score`, parsed as a score request, or with a `query` as a rerank request.

    The clients of openai-batch send rerank requests there.
    """
    if "query" in body:
        return read_body(RerankRequest, body)
    return read_body(ScoreRequest, body)


def check_request(
    url: str,
    body: dict[str, Any],
    served_names: Sequence[str] | None,
    endpoints: Sequence[str] = ENDPOINTS,
) -> BaseModel:
    """Return a request; raises the `RequestError` that an engine with these names would return.

    Checks are in the engine's order: the URL, `stream`, `model` (unless `served_names` is None),
    the rest of the body.
    """
    # Long URLs are not cached: one may be as long as a line.
    find = _cached_route if len(url) <= _MAX_CACHED_CHARS else served_route
    route = find(url, tuple(endpoints))
    if "stream" in body:
        refuse_stream(body)
    if served_names is not None and "model" in body:
        name_of_model(body, served_names)
    return read_score(body) if route is SCORE else read_body(_REQUESTS[route.name], body)


def interactive_priority(body: Mapping[str, Any]) -> int | None:
    """Return the priority of an interactive request, valid or not: the lowest comes first.

    It is None for a request that waits for all others, as rows of files do: tier `flex`.
    """
    tier, priority = body.get("service_tier"), body.get("priority")
    if tier == "flex":
        return None
    if isinstance(priority, int | float) and abs(priority) <= MAX_PRIORITY:
        return int(priority)
    return -1 if tier in _FAST_TIERS else 0


def num_sequences(body: Mapping[str, Any]) -> int:
    """Return an estimate of the number of sequences of a body, valid or not."""
    count = 1
    for name in _SEQUENCE_LISTS:
        value = body.get(name)
        if not isinstance(value, list) or not value or isinstance(value[0], int):
            continue
        is_object = name == "input" and isinstance(value[0], dict)
        if not is_object or "text_pair" in value[0]:  # others are items of one conversation
            count = max(count, len(value))
    questions, orders = body.get("questions"), body.get("debias")
    if isinstance(questions, (list, dict)):
        num_orders = orders if isinstance(orders, int) and 0 < orders <= MAX_ORDERS else 1
        count = max(count, len(questions) * num_orders)
    num_choices = body.get("n")
    if isinstance(num_choices, int) and 0 < num_choices <= MAX_CHOICES:
        return count * num_choices
    return count
