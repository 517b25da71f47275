"""Request validation that needs no model: parameters, body and the errors for both.

An engine responds with these errors; a file check before loading the engine predicts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel

from .audio import TranscriptionRequest, TranslationRequest
from .chat import ChatCompletionRequest
from .completions import CompletionRequest
from .decisions.openai_body import DecisionRequest
from .decisions.systemone_body import SystemOneRequest
from .embeddings import EmbeddingRequest
from .names import name_of_model
from .routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    ENDPOINTS,
    GENERATIVE_SCORING,
    RERANK,
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
    DECISION,
    GENERATION,
    SCORES,
    SYSTEM_ONE_BODY,
    TRANSCRIPTION,
    TRANSLATION,
    VECTORS,
    NeutralValues,
    refuse_unsupported,
)
from .validation import parse

PROMPT_FIELDS = (
    *("messages", "prompt", "input", "state"),
    *("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
)
"""Body fields that contain the model's input, except audio."""

_PROMPT_NAMES = frozenset({*PROMPT_FIELDS, "file"})
_TEXT_FIELDS = {"role", "content"}
_OF_TEXTS = (ChatCompletionRequest, CompletionRequest, EmbeddingRequest)
_MAX_FORMS, _MAX_FORM_BYTES, _MAX_TEXTS = 256, 2**15, 64

_Request = TypeVar("_Request", bound=BaseModel)

_REQUESTS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        CHAT_COMPLETIONS.name: ChatCompletionRequest,
        COMPLETIONS.name: CompletionRequest,
        GENERATIVE_SCORING.name: GenerativeScoringRequest,
        DECISIONS.name: DecisionRequest,
        SYSTEM_ONE.name: SystemOneRequest,
        EMBEDDINGS.name: EmbeddingRequest,
        RERANK.name: RerankRequest,
        TRANSCRIPTIONS.name: TranscriptionRequest,
        TRANSLATIONS.name: TranslationRequest,
    }
)
_NEUTRAL_VALUES: Mapping[type[BaseModel], NeutralValues] = MappingProxyType(
    {
        ChatCompletionRequest: CHAT,
        EmbeddingRequest: VECTORS,
        ScoreRequest: SCORES,
        RerankRequest: SCORES,
        GenerativeScoringRequest: SCORES,
        DecisionRequest: DECISION,
        SystemOneRequest: SYSTEM_ONE_BODY,
        TranscriptionRequest: TRANSCRIPTION,
        TranslationRequest: TRANSLATION,
    }
)


def request_types(route: Route) -> tuple[type[BaseModel], ...]:
    """Return the types that an endpoint's body may be parsed as."""
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
    route = served_route(url, endpoints)
    refuse_stream(body)
    if served_names is not None:
        name_of_model(body, served_names)
    return read_score(body) if route is SCORE else read_body(_REQUESTS[route.name], body)


class RequestChecker:
    """Checks requests of one file like `check_request`, once for those that differ only in texts.

    A text is a prompt, or the content of a message without other fields: any text is valid.
    """

    def __init__(self, served_names: Sequence[str], endpoints: Sequence[str] = ENDPOINTS) -> None:
        self._served_names = served_names
        self._endpoints = endpoints
        self._valid: set[tuple[str, bytes, tuple[str, ...]]] = set()

    def check(self, url: str, body: dict[str, Any], settings: bytes) -> None:
        """Raise the `RequestError` of a request; `settings` is the `settings_key` of its body."""
        form = url, settings, _roles_of_texts(body)
        if form in self._valid:
            return
        request = check_request(url, body, self._served_names, self._endpoints)
        is_short = len(url) + len(settings) <= _MAX_FORM_BYTES and len(form[2]) <= _MAX_TEXTS
        if isinstance(request, _OF_TEXTS) and is_short and form[2]:
            if len(self._valid) == _MAX_FORMS:
                self._valid.clear()
            self._valid.add(form)


def _roles_of_texts(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the roles of a body's messages, or the field of its prompt; empty if not all texts."""
    names = _PROMPT_NAMES.intersection(body)
    if len(names) != 1:
        return ()
    (name,) = names
    value = body[name]
    if name != "messages":
        return (name,) if isinstance(value, str) and value else ()
    if not isinstance(value, list):
        return ()
    roles = []
    for message in value:
        if not (isinstance(message, dict) and message.keys() == _TEXT_FIELDS):
            return ()
        role = message["role"]
        if not (isinstance(role, str) and isinstance(message["content"], str)):
            return ()
        roles.append(role)
    return tuple(roles)
