"""`/v2/embed`: Cohere's form of embeddings, with vectors of several types in one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.bodies import response_id
from tidemill.protocol.cohere_embed import CohereEmbedRequest, EmbeddingType, cohere_body
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.embeddings import EmbeddingRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import COHERE_EMBED

from ..scheduling.encoding import EncodingRequest, EncodingResult
from .embeddings import Embeddings
from .endpoint import Prepared, RequestMetadata
from .text_draft import TextDraft
from .vectors import PACKED, as_base64, as_numbers, converted, normalize


class _Context(NamedTuple):
    """A request, and the one to `/v1/embeddings` that it becomes."""

    cohere: CohereEmbedRequest
    request: EmbeddingRequest


_Prepared = Prepared[EncodingRequest, _Context]


class CohereEmbed:
    """The endpoint of any embedding model for Cohere's clients."""

    route = COHERE_EMBED

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each text."""
        return self.draft(body, metadata).read()

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared]:
        """Draft what `prepare` returns."""
        cohere = read_body(CohereEmbedRequest, body)
        embeddings = self._embeddings
        request = cohere.embedding_request(
            embeddings.prompts, embeddings.max_model_len, embeddings.default_cut
        )
        try:
            embeddings.check_width(request.dimensions)
            if not PACKED.isdisjoint(cohere.types):
                embeddings.check_dtype(request, "binary", "embedding_types")
        except RequestError as error:
            error.message = error.message.replace("`dimensions`", "`output_dimension`")
            if error.param == "dimensions":
                error.param = "output_dimension"
            raise
        param = "inputs" if cohere.texts is None else "texts"
        context = _Context(cohere, request)
        sequences = embeddings.sequences(request, metadata.created, param)
        return sequences.then(lambda requests: Prepared(requests, context, metadata))

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the vectors of each type in the order of the texts."""
        cohere, request = prepared.context
        vectors = [self._embeddings.vector(result, request) for result in results]
        num_tokens = sum(result.num_tokens for result in results)
        answer = cohere_body(
            response_id("embd", prepared.metadata.request_id),
            embeddings={
                kind: [
                    as_base64(vector)
                    if kind == "base64"
                    else as_numbers(converted(_scaled(vector, kind), kind))
                    for vector in vectors
                ]
                for kind in cohere.types
            },
            texts=cohere.joined_texts,
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))


def _scaled(vector: NDArray[np.float32], kind: EmbeddingType) -> NDArray[np.float32]:
    """Return a vector as its elements need it: bytes are of values up to 1."""
    return normalize(vector) if kind in {"int8", "uint8"} else vector
