"""Scoring and reranking: scores of text pairs, from a cross-encoder or from cosine similarity.

A reranker (cross-encoder) reads both texts of a pair together. With an embedding model the score is
the cosine of two vectors, as returned by `/v1/embeddings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_body, read_score
from tidemill.protocol.routes import RERANK, SCORE
from tidemill.protocol.scoring import RerankRequest, ScoreRequest, rerank_body, score_body

from ..scheduling.encoding import EncodingRequest, EncodingResult
from .encoder_requests import EncoderModel, EncodingRequestBuilder
from .endpoint import Prepared, RequestMetadata
from .text_draft import TextDraft
from .vectors import as_numbers, check_finite, normalize

Numbers = NDArray[np.float64]
Sides = tuple[list[int], list[int]]

ACTIVATIONS: Mapping[str, Callable[[Numbers], Numbers]] = MappingProxyType(
    {
        "Identity": lambda x: x,
        "ReLU": lambda x: np.maximum(x, 0.0),
        "Sigmoid": lambda x: np.exp(-np.logaddexp(0.0, -x)),
        "Tanh": np.tanh,
    }
)
"""Activations of a one-label score, by their names in torch.nn."""


@dataclass(frozen=True, slots=True)
class PairRequest:
    """A request for scores; `sides` contains the index of each text's sequence, for both sides.

    It is None if each pair is one sequence.
    """

    request: ScoreRequest | RerankRequest
    sides: Sides | None


PreparedPairs = Prepared[EncodingRequest, PairRequest]


class PairScorer:
    """Scores pairs of texts by one model, a reranker or an embedding model."""

    def __init__(self, model: EncoderModel) -> None:
        self._requests = EncodingRequestBuilder(model)
        self._gives_vectors = model.description.task == "embed"
        self._has_template = model.reads_pairs_by_template  # which truncates text by text
        self._activation = ACTIVATIONS[model.description.activation]

    def can_draft(self, request: ScoreRequest | RerankRequest) -> bool:
        """Return whether no text is rendered or truncated before it is tokenized with others."""
        is_cut = bool(request.max_tokens_per_query or request.max_tokens_per_doc)
        return not (self._has_template or (self._gives_vectors and is_cut))

    def draft(
        self, request: ScoreRequest | RerankRequest, metadata: RequestMetadata
    ) -> TextDraft[PreparedPairs]:
        """Draft a sequence for each pair, or for each distinct text."""
        firsts, seconds = request.sides
        if not self._gives_vectors:
            return self._requests.from_pairs(
                firsts, seconds, request, param=request.names[1], created=metadata.created
            ).then(lambda sequences: Prepared(sequences, PairRequest(request, None), metadata))
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise RequestError(
                    f"`{name}` requires a reranker; this is an embedding model.", param=name
                )
        return self._draft_texts(request, metadata)

    def finish(self, prepared: PreparedPairs, results: Sequence[EncodingResult]) -> Reply:
        """Return the scores in the order of the pairs, or the ranking."""
        pairs, metadata = prepared.context, prepared.metadata
        if pairs.sides is None:
            scores = self._activate(results, pairs.request)
            num_tokens = sum(result.num_tokens for result in results)
        else:
            scores = _cosines(results, pairs.sides)
            num_tokens = sum(results[i].num_tokens for side in pairs.sides for i in side)
        shown = as_numbers(scores.astype(np.float32))
        if isinstance(pairs.request, RerankRequest):
            answer = rerank_body(
                response_id("rerank", metadata.request_id),
                model=metadata.model,
                scores=shown,
                request=pairs.request,
                num_tokens=num_tokens,
            )
        else:
            answer = score_body(
                response_id("score", metadata.request_id),
                created=metadata.created,
                model=metadata.model,
                scores=shown,
                num_tokens=num_tokens,
            )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))

    def _draft_texts(
        self, request: ScoreRequest | RerankRequest, metadata: RequestMetadata
    ) -> TextDraft[PreparedPairs]:
        """Draft a sequence for each distinct text of both sides."""
        prefix = self._requests.prompt_named(None)
        limits = (request.max_tokens_per_query, request.max_tokens_per_doc)
        firsts, seconds = (
            self._requests.from_prompts(texts, request, param=param, prefix=prefix, limit=limit)
            for texts, param, limit in zip(request.sides, request.names, limits, strict=True)
        )

        def complete(encodings: list[Any]) -> PreparedPairs:
            count = len(firsts.texts)
            sides = firsts.complete(encodings[:count]), seconds.complete(encodings[count:])
            places: dict[tuple[int, ...], int] = {}
            sequences: list[EncodingRequest] = []
            for sequence in (*sides[0], *sides[1]):
                if places.setdefault(tuple(sequence.token_ids), len(sequences)) == len(sequences):
                    sequences.append(sequence)
            first, second = (
                [places[tuple(sequence.token_ids)] for sequence in side] for side in sides
            )
            return Prepared(sequences, PairRequest(request, (first, second)), metadata)

        texts = [*firsts.texts, *seconds.texts]
        return TextDraft(firsts.reader, texts, firsts.add_special_tokens, complete)

    def _activate(
        self, results: Sequence[EncodingResult], request: ScoreRequest | RerankRequest
    ) -> Numbers:
        """Return the score `[pairs]` of each pair, raw with `use_activation: false`."""
        scores = check_finite(np.array([result.values[0] for result in results])).astype(np.float64)
        return scores if request.use_activation is False else self._activation(scores)


def _cosines(results: Sequence[EncodingResult], sides: Sides) -> Numbers:
    """Return the cosine `[pairs]` of each second vector and its first vector."""
    rows = normalize(check_finite(np.stack([result.values for result in results])))  # [texts, D]
    firsts, seconds = (
        rows[side].astype(np.float64) for side in sides
    )  # [1 or pairs, D], [pairs, D]
    cosines: Numbers = (firsts * seconds).sum(axis=1)
    return cosines


class Rerank:
    """The rerank endpoint, of rerankers and embedding models."""

    route = RERANK

    def __init__(self, model: EncoderModel) -> None:
        self._pairs = PairScorer(model)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> PreparedPairs:
        """Return a sequence for each pair, or for each text of an embedding model."""
        return self._pairs.draft(read_body(RerankRequest, body), metadata).read()

    def draft(
        self, body: dict[str, Any], metadata: RequestMetadata
    ) -> TextDraft[PreparedPairs] | None:
        """Draft what `prepare` returns; None if its texts are rendered or truncated first."""
        request = read_body(RerankRequest, body)
        return self._pairs.draft(request, metadata) if self._pairs.can_draft(request) else None

    def finish(self, prepared: PreparedPairs, results: Sequence[EncodingResult]) -> Reply:
        """Return the documents, the highest score first."""
        return self._pairs.finish(prepared, results)


class Score:
    """The score endpoint, of rerankers and embedding models."""

    route = SCORE

    def __init__(self, model: EncoderModel) -> None:
        self._pairs = PairScorer(model)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> PreparedPairs:
        """Return a sequence for each pair, or for each text of an embedding model."""
        return self._pairs.draft(read_score(body), metadata).read()

    def draft(
        self, body: dict[str, Any], metadata: RequestMetadata
    ) -> TextDraft[PreparedPairs] | None:
        """Draft what `prepare` returns; None if its texts are rendered or truncated first."""
        request = read_score(body)
        return self._pairs.draft(request, metadata) if self._pairs.can_draft(request) else None

    def finish(self, prepared: PreparedPairs, results: Sequence[EncodingResult]) -> Reply:
        """Return the scores."""
        return self._pairs.finish(prepared, results)
