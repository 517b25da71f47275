"""What scores and rankings have in common: pairs of texts into numbers, in either of two ways.

A reranker reads the two texts of a pair together. Of a model that gives vectors the score is the
cosine of two of them, just as `/v1/embeddings` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from engine.contract import Reply, Usage
from engine.endpoints.encodings import EncoderModel, Encodings
from engine.endpoints.endpoint import Heading, Prepared
from engine.endpoints.vectors import as_numbers, at_length_one, checked
from engine.protocol.bodies import response_id
from engine.protocol.errors import RequestError
from engine.protocol.scoring import RerankRequest, ScoreRequest, rerank_body, score_body
from engine.scheduling.encoding import EncodingRequest, EncodingResult

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
"""What the score of one label may go through, by its name in torch.nn."""


@dataclass(frozen=True, slots=True)
class PairsAsked:
    """A request for scores; `sides` are which sequences the texts of either side have.

    It is None where each pair has a sequence of its own.
    """

    request: ScoreRequest | RerankRequest
    sides: Sides | None


PreparedPairs = Prepared[EncodingRequest, PairsAsked]


class Pairs:
    """Scores the pairs of requests by one model, a reranker or one that gives vectors."""

    def __init__(self, model: EncoderModel) -> None:
        self._encodings = Encodings(model)
        self._gives_vectors = model.description.task == "embed"
        self._activation = ACTIVATIONS[model.description.activation]

    def prepare(self, request: ScoreRequest | RerankRequest, heading: Heading) -> PreparedPairs:
        """Return a sequence for each pair, or for each of the texts, each of them once."""
        firsts, seconds = request.sides
        if not self._gives_vectors:
            sequences = self._encodings.of_pairs(
                firsts, seconds, request, param=request.names[1], created=heading.created
            )
            return Prepared(sequences, PairsAsked(request, None), heading)
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise RequestError(
                    f"`{name}` is for a reranker; this model gives vectors.", param=name
                )
        return self._of_vectors(request, heading)

    def finish(self, prepared: PreparedPairs, results: Sequence[EncodingResult]) -> Reply:
        """Return the scores in the order of their pairs, or the ranking that was asked for."""
        asked, heading = prepared.context, prepared.heading
        if asked.sides is None:
            scores = self._activated(results, asked.request)
            num_tokens = sum(result.num_tokens for result in results)
        else:
            scores = _cosines(results, asked.sides)
            num_tokens = sum(results[i].num_tokens for side in asked.sides for i in side)
        shown = as_numbers(scores.astype(np.float32))
        if isinstance(asked.request, RerankRequest):
            answer = rerank_body(
                response_id("rerank", heading.request_id),
                model=heading.model,
                scores=shown,
                request=asked.request,
                num_tokens=num_tokens,
            )
        else:
            answer = score_body(
                response_id("score", heading.request_id),
                created=heading.created,
                model=heading.model,
                scores=shown,
                num_tokens=num_tokens,
            )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))

    def _of_vectors(self, request: ScoreRequest | RerankRequest, heading: Heading) -> PreparedPairs:
        """Return a sequence for each text of either side; texts that are alike have one."""
        places: dict[tuple[int, ...], int] = {}
        sequences: list[EncodingRequest] = []
        sides: list[list[int]] = []
        limits = (request.max_tokens_per_query, request.max_tokens_per_doc)
        for texts, param, limit in zip(request.sides, request.names, limits, strict=True):
            side = self._encodings.of_prompts(
                texts, request, param=param, prefix=self._encodings.prompt_of(None), limit=limit
            )
            for sequence in side:
                if places.setdefault(tuple(sequence.token_ids), len(sequences)) == len(sequences):
                    sequences.append(sequence)
            sides.append([places[tuple(sequence.token_ids)] for sequence in side])
        return Prepared(sequences, PairsAsked(request, (sides[0], sides[1])), heading)

    def _activated(
        self, results: Sequence[EncodingResult], request: ScoreRequest | RerankRequest
    ) -> Numbers:
        """Return the score `[pairs]` of each pair, as it stands where no activation is wanted."""
        scores = checked(np.array([result.values[0] for result in results])).astype(np.float64)
        return scores if request.use_activation is False else self._activation(scores)


def _cosines(results: Sequence[EncodingResult], sides: Sides) -> Numbers:
    """Return the cosine `[pairs]` of each vector of the second side with its one of the first."""
    rows = at_length_one(checked(np.stack([result.values for result in results])))  # [texts, D]
    firsts, seconds = (
        rows[side].astype(np.float64) for side in sides
    )  # [1 or pairs, D], [pairs, D]
    cosines: Numbers = (firsts * seconds).sum(axis=1)
    return cosines
