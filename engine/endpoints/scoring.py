"""Scoring and reranking: scores of text pairs, from a cross-encoder or by comparing vectors.

A reranker (cross-encoder) reads both texts of a pair together. With an embedding model the score is
the cosine of two vectors, as returned by `/v1/embeddings`. With a late-interaction model (ColBERT)
it is MaxSim: each vector of the query is compared with the most similar one of the document.
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
from .encoder_requests import DOCUMENT, QUERY, EncoderModel, EncodingRequestBuilder
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

MAX_COMPARED_NUMBERS = 80_000_000
"""The most numbers of the vectors that a request compares by MaxSim: 320 MB of memory."""

_SCORE_OF_NOTHING = -1e9
"""The score of a document without a vector, as in sentence-transformers: below any other."""


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
        self._gives_vectors = model.description.task in ("embed", "token_embed")
        self._mode, self._width = model.description.multi_vector, model.width
        self._is_normalized = model.description.normalize
        self._skipped_ids = list(model.skipped_ids)
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
            if self._mode is None:
                scores = _cosines(results, pairs.sides)
            else:
                scores = self._maxsims(prepared.requests, results, pairs.sides)
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
        is_late = self._mode is not None
        names: tuple[str | None, ...] = (QUERY, DOCUMENT) if is_late else (None, None)
        limits = (request.max_tokens_per_query, request.max_tokens_per_doc)
        firsts, seconds = (
            self._requests.from_prompts(
                texts,
                request,
                param=param,
                prefix=self._requests.prompt_named(name),
                limit=limit,
                is_query=name == QUERY,
            )
            for texts, param, limit, name in zip(
                request.sides, request.names, limits, names, strict=True
            )
        )

        def complete(encodings: list[Any]) -> PreparedPairs:
            count = len(firsts.texts)
            sides = firsts.complete(encodings[:count]), seconds.complete(encodings[count:])
            places: dict[tuple[int, ...], int] = {}
            sequences: list[EncodingRequest] = []
            for sequence in (*sides[0], *sides[1]):
                if places.setdefault(_key_of(sequence), len(sequences)) == len(sequences):
                    sequences.append(sequence)
            if self._mode is not None:
                self._check_size(sequences, request.names[1])
            first, second = ([places[_key_of(sequence)] for sequence in side] for side in sides)
            return Prepared(sequences, PairRequest(request, (first, second)), metadata)

        texts = [*firsts.texts, *seconds.texts]
        return TextDraft(firsts.reader, texts, firsts.add_special_tokens, complete)

    def _check_size(self, sequences: Sequence[EncodingRequest], param: str) -> None:
        """Reject texts whose vectors would not fit into memory."""
        num_tokens = sum(len(each.token_ids) for each in sequences)
        if num_tokens * self._width > MAX_COMPARED_NUMBERS:
            raise RequestError(
                f"The texts have {num_tokens} tokens with {self._width} numbers each; a request "
                f"compares at most {MAX_COMPARED_NUMBERS:,} numbers. Send fewer texts per request.",
                param=param,
            )

    def _maxsims(
        self,
        requests: Sequence[EncodingRequest],
        results: Sequence[EncodingResult],
        sides: Sides,
    ) -> Numbers:
        """Return the MaxSim `[pairs]` of each second text and its first text."""
        assert self._mode is not None
        firsts, seconds = (
            {place: self._rows(requests[place], results[place], skips=skips) for place in side}
            for side, skips in zip(sides, (self._mode.skips_in_queries, True), strict=True)
        )
        queries = sides[0] * (len(sides[1]) if len(sides[0]) == 1 else 1)
        scores = [
            _maxsim(firsts[query], seconds[document], is_mean=self._mode.is_mean)
            for query, document in zip(queries, sides[1], strict=True)
        ]
        return np.array(scores)

    def _rows(
        self, request: EncodingRequest, result: EncodingResult, *, skips: bool
    ) -> NDArray[np.float32]:
        """Return the vectors `[t, D]` of a text, with `skips` without those of skipped words."""
        rows = check_finite(result.values)
        if skips and self._skipped_ids:
            rows = rows[~np.isin(request.token_ids, self._skipped_ids)]
        return normalize(rows) if self._is_normalized else rows

    def _activate(
        self, results: Sequence[EncodingResult], request: ScoreRequest | RerankRequest
    ) -> Numbers:
        """Return the score `[pairs]` of each pair, raw with `use_activation: false`."""
        scores = check_finite(np.array([result.values[0] for result in results])).astype(np.float64)
        return scores if request.use_activation is False else self._activation(scores)


def _key_of(sequence: EncodingRequest) -> tuple[int, ...]:
    """Return the key of a text: its tokens, and the number of unseen ones."""
    return (*sequence.token_ids, sequence.num_unseen)


def _maxsim(query: NDArray[np.float32], document: NDArray[np.float32], *, is_mean: bool) -> float:
    """Return the largest similarity of a document's `[t, D]` to each vector of a query `[q, D]`.

    They are summed, or averaged with `is_mean`.
    """
    if not len(document):
        return _SCORE_OF_NOTHING
    largest = (query @ document.T).max(axis=1)
    return float(largest.mean() if is_mean and len(query) else largest.sum())


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
