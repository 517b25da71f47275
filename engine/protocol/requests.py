"""What is wrong with a request, as far as can be told without its model: the words are said here.

An engine answers with them, and whoever looks at a file before an engine is there foretells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel

from engine.protocol.audio import TranscriptionRequest, TranslationRequest
from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.completions import CompletionRequest
from engine.protocol.embeddings import EmbeddingRequest
from engine.protocol.names import name_of_model
from engine.protocol.routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    RERANK,
    SCORE,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    served_route,
)
from engine.protocol.scoring import RerankRequest, ScoreRequest
from engine.protocol.stream import refuse_stream
from engine.protocol.unsupported import (
    CHAT,
    GENERATION,
    SCORES,
    TRANSCRIPTION,
    TRANSLATION,
    VECTORS,
    NeutralValues,
    refuse_unsupported,
)
from engine.protocol.validation import parse

_Request = TypeVar("_Request", bound=BaseModel)

_REQUESTS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        CHAT_COMPLETIONS.name: ChatCompletionRequest,
        COMPLETIONS.name: CompletionRequest,
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
        TranscriptionRequest: TRANSCRIPTION,
        TranslationRequest: TRANSLATION,
    }
)


def read_body(kind: type[_Request], body: Mapping[str, Any]) -> _Request:
    """Return a body as what its endpoint takes.

    Raises `RequestError` for a parameter that is not served, or a body that is not valid.
    """
    refuse_unsupported(body, _NEUTRAL_VALUES.get(kind, GENERATION))
    return parse(kind, body)


def read_score(body: Mapping[str, Any]) -> ScoreRequest | RerankRequest:
    """Return what a body at `/score` asks for: scores, or with a `query` a ranking.

    The clients of openai-batch send rankings there.
    """
    if "query" in body:
        return read_body(RerankRequest, body)
    return read_body(ScoreRequest, body)


def check_request(
    url: str,
    body: dict[str, Any],
    served_names: Sequence[str] | None,
    endpoints: Sequence[str] = ENDPOINTS,
) -> None:
    """Raise the `RequestError` that an engine under these names would answer with, if any.

    Looked at in an engine's order: the url, `stream`, `model` unless nobody knows what is served,
    the rest of the body.
    """
    route = served_route(url, endpoints)
    refuse_stream(body)
    if served_names is not None:
        name_of_model(body, served_names)
    if route is SCORE:
        read_score(body)
    else:
        read_body(_REQUESTS[route.name], body)
