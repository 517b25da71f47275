"""The registry of endpoints. Each endpoint is one file and one line here."""

from __future__ import annotations

from typing import Any

from tidemill.protocol.moderation import are_named

from ..model.encoders.decision_heads import CodeReadout, JointHead, MarkerHead
from ..parsers.guards import guard_format
from ..parsers.registry import ParserSet
from ..scheduling.encoding import EncodingRequest, EncodingResult
from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..scheduling.speech import SpeechRequest, SpeechResult
from ..text.text_model import TextModel
from .chat import ChatCompletions
from .classification import Classify
from .cohere_embed import CohereEmbed
from .completions import Completions
from .decisions.chat_reader import ChatReader
from .decisions.code_readout import CodeReader
from .decisions.endpoints import Decisions, SystemOne
from .decisions.joint_schema import JointReader
from .decisions.liquid_labels import LIQUID, LiquidReader
from .decisions.next_token import NextTokenReader
from .decisions.option_markers import MarkerReader
from .decisions.reader import DecisionReader
from .embeddings import Embeddings
from .encoder_requests import EncoderModel
from .endpoint import Endpoint
from .generative_scoring import GenerativeScoring
from .guard_moderation import GuardModerations
from .image_inputs import ImageSupport
from .media_fetch import Fetch, MediaFetcher, RecordingFetcher
from .moderation import Moderations
from .pooling import Pool
from .responses import Responses
from .scoring import Rerank, Score
from .token_classification import ClassifyTokens
from .tokens import Detokenize, Tokenize, TokenizerInfo
from .transcriptions import SpeechModel, Transcriptions

_NO_PARSERS = ParserSet()

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
    parsers: ParserSet = _NO_PARSERS,
    image_support: ImageSupport | None = None,
    verifies: bool = False,
    architecture: str = "",
) -> tuple[Endpoint[SequenceRequest, SequenceResult, Any], ...]:
    """Return the endpoints of a generation model, with the parsers of its output.

    `seed` is the default for requests without one. A vision model has `image_support`. With
    `verifies`, constrained answers include a verdict. The `architecture` is the model's class.
    """
    chat = ChatCompletions(
        model, seed=seed, parsers=parsers, image_support=image_support, verifies=verifies
    )
    completions = Completions(model, seed=seed, verifies=verifies)
    reader: DecisionReader = NextTokenReader(model, parsers, image_support)
    if architecture == LIQUID and model.chat_template is not None:
        reader = LiquidReader(model, parsers)
    by_chat = ChatReader(chat, may_reason=parsers.reasoning is not None)
    decisions = (Decisions(reader, by_chat), SystemOne(reader, by_chat))
    guard = None if model.chat_template is None else guard_format([model.chat_template.source_text])
    moderations = () if guard is None else (GuardModerations(model, guard),)
    scoring = GenerativeScoring(model)
    return (chat, completions, scoring, *decisions, Responses(chat), *moderations)


def token_endpoints(
    model: TextModel, *, parsers: ParserSet = _NO_PARSERS
) -> tuple[Endpoint[SequenceRequest, SequenceResult, Any], ...]:
    """Return the endpoints that tokenize and detokenize, and describe the tokenizer."""
    return (Tokenize(model, parsers=parsers), Detokenize(model), TokenizerInfo(model))


def encoder_endpoints(
    model: EncoderModel,
) -> tuple[Endpoint[EncodingRequest, EncodingResult, Any], ...]:
    """Return the endpoints of an embedding model, a reranker, a classifier or a decision model."""
    if (reader := _head_reader(model)) is not None:
        return (Decisions(reader), SystemOne(reader))
    task, labels = model.description.task, model.description.labels
    if task == "token_classify":
        return (ClassifyTokens(model), Pool(model))
    if task == "embed_sparse":
        return (Pool(model),)
    if task == "token_embed":
        return (Score(model), Rerank(model), Pool(model))
    moderations = (Moderations(model),) if are_named(labels) else ()
    classify = (Classify(model), *moderations, Pool(model)) if labels else ()
    if task == "classify":
        return classify
    scores = (Score(model), Rerank(model), *classify)
    if task != "embed":
        return scores
    embeddings = Embeddings(model)
    return (embeddings, CohereEmbed(embeddings), *scores, Pool(model))


def speech_endpoints(
    model: SpeechModel, fetch: Fetch
) -> tuple[Endpoint[SpeechRequest, SpeechResult, Any], ...]:
    """Return the endpoints of a speech recognition model, one for each of its tasks."""
    urls = RecordingFetcher(MediaFetcher(fetch, model.max_file_bytes))
    return tuple(Transcriptions(model, task, urls.step_after) for task in model.hearing.tasks)


def _head_reader(model: EncoderModel) -> DecisionReader | None:
    """Return the reader of a model's decision head, None without one."""
    match model.description.head:
        case CodeReadout() as head:
            return CodeReader(model, head)
        case JointHead():
            return JointReader(model)
        case MarkerHead() as head:
            return MarkerReader(model, head)
    return None
