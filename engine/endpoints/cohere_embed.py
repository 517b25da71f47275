"""`/v2/embed`: Cohere's form of embeddings, with vectors of several types in one answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.bodies import response_id
from tidemill.protocol.cohere_embed import CohereEmbedRequest, EmbeddingType, cohere_body
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.embeddings import EmbeddingRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.parts import PlacedImage
from tidemill.protocol.routes import COHERE_EMBED

from ..scheduling.encoding import EncodingRequest, EncodingResult
from .embeddings import Embeddings
from .encoder_requests import image_bytes
from .endpoint import Prepared, RequestMetadata
from .image_inputs import request_with_images
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

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        if body.get("texts") is not None:
            return None
        return self._embeddings.requests.images.fetched(body, CohereEmbedRequest, _placed_images)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each text or image."""
        return self.draft(body, metadata).read()

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared]:
        """Draft what `prepare` returns."""
        cohere = request_with_images(CohereEmbedRequest, body)
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
        images = self._images(cohere, body)

        def prepared(texts: Sequence[EncodingRequest]) -> _Prepared:
            left = iter(texts)
            count = len(cohere.joined_texts) + len(images)
            requests = [images.get(i) or next(left) for i in range(count)]
            return Prepared(requests, _Context(cohere, request), metadata, image_bytes(requests))

        return embeddings.sequences(request, param).then(prepared)

    def _images(
        self, cohere: CohereEmbedRequest, body: dict[str, Any]
    ) -> dict[int, EncodingRequest]:
        """Return the sequences of the images by their indexes among all vectors."""
        placed = cohere.placed_images
        if not placed:
            return {}
        pages = self._embeddings.requests.from_images([*placed.values()], body)
        for image, several in zip(placed.values(), pages, strict=True):
            if len(several) > 1:
                raise RequestError(
                    f"`{image.place}` has {len(several)} pages: send an image per vector.",
                    param=image.place,
                )
        return {i: several[0] for i, several in zip(placed, pages, strict=True)}

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the vectors of each type in the order of the inputs."""
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
            num_images=len(cohere.placed_images),
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))


def _placed_images(request: CohereEmbedRequest) -> list[PlacedImage]:
    return [*request.placed_images.values()]


def _scaled(vector: NDArray[np.float32], kind: EmbeddingType) -> NDArray[np.float32]:
    """Return a vector as its elements need it: bytes are of values up to 1."""
    return normalize(vector) if kind in {"int8", "uint8"} else vector
