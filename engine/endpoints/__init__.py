"""The endpoints that are served: each is one file, and one line here."""

from __future__ import annotations

from typing import Any

from engine.answers.forms import AnswerForms
from engine.endpoints.bringing import Bringing, Fetch
from engine.endpoints.chat import ChatCompletions
from engine.endpoints.completions import Completions
from engine.endpoints.embeddings import Embeddings
from engine.endpoints.encodings import EncoderModel
from engine.endpoints.endpoint import Endpoint
from engine.endpoints.images import Eyes
from engine.endpoints.recordings import FileUrls
from engine.endpoints.rerank import Rerank
from engine.endpoints.score import Score
from engine.endpoints.tokens import Detokenize, Tokenize
from engine.endpoints.transcriptions import Recordings, SpeechModel
from engine.scheduling.encoding import EncodingRequest, EncodingResult
from engine.scheduling.sequence import SequenceRequest, SequenceResult
from engine.scheduling.speech import SpeechRequest, SpeechResult
from engine.text.text_model import TextModel

_NO_FORMS = AnswerForms()

__all__ = [
    "Endpoint",
    "SpeechModel",
    "encoder_endpoints",
    "speech_endpoints",
    "text_endpoints",
    "token_endpoints",
]


def text_endpoints(
    model: TextModel,
    *,
    seed: int,
    forms: AnswerForms = _NO_FORMS,
    eyes: Eyes | None = None,
    proves: bool = False,
) -> tuple[Endpoint[SequenceRequest, SequenceResult, Any], ...]:
    """Return the endpoints of a model that generates text and answers in these forms.

    `seed` keys requests that name none. One that sees has `eyes`. Where it `proves`, answers that
    were held to a form come with a judgement of it.
    """
    chat = ChatCompletions(model, seed=seed, forms=forms, eyes=eyes, proves=proves)
    return (chat, Completions(model, seed=seed, proves=proves))


def token_endpoints(
    model: TextModel, *, forms: AnswerForms = _NO_FORMS
) -> tuple[Endpoint[SequenceRequest, SequenceResult, Any], ...]:
    """Return what tells people of a model's tokens."""
    return (Tokenize(model, forms=forms), Detokenize(model))


def encoder_endpoints(
    model: EncoderModel,
) -> tuple[Endpoint[EncodingRequest, EncodingResult, Any], ...]:
    """Return the endpoints of a model that gives vectors, or of one that gives scores alone."""
    scores = (Score(model), Rerank(model))
    return (Embeddings(model), *scores) if model.description.task == "embed" else scores


def speech_endpoints(
    model: SpeechModel, fetch: Fetch
) -> tuple[Endpoint[SpeechRequest, SpeechResult, Any], ...]:
    """Return the endpoints of a model that hears, for the tasks that it has."""
    urls = FileUrls(Bringing(fetch, model.max_file_bytes))
    return tuple(Recordings(model, task, urls.after) for task in model.hearing.tasks)
