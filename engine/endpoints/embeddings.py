"""`/v1/embeddings`: texts in, one vector for each out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.embeddings import EmbeddingRequest, OutputDtype, embedding_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.routes import EMBEDDINGS

from ..scheduling.encoding import EncodingRequest, EncodingResult
from .encoder_requests import (
    EncoderModel,
    EncodingRequestBuilder,
    image_bytes,
)
from .endpoint import Prepared, RequestMetadata
from .image_inputs import request_with_images
from .text_draft import TextDraft
from .vectors import PACKED, as_base64, as_numbers, check_finite, converted, normalize

_Prepared = Prepared[EncodingRequest, EmbeddingRequest]


class Embeddings:
    """The endpoint of any embedding model."""

    route = EMBEDDINGS

    def __init__(self, model: EncoderModel) -> None:
        self.requests = EncodingRequestBuilder(model)
        self._description = model.description
        self._width = model.width
        self.max_model_len = model.max_model_len
        self.default_cut = model.truncate_prompt_tokens or -1

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each input, or for the conversation."""
        return self._draft(body, metadata).read()

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        return self.requests.fetched(body, EmbeddingRequest)

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared] | None:
        """Draft what `prepare` returns; None for a conversation, which is rendered first."""
        return None if body.get("messages") is not None else self._draft(body, metadata)

    def _draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared]:
        request = request_with_images(EmbeddingRequest, body)
        self.check_width(request.dimensions)
        self.check_dtype(request, request.output_dtype, "output_dtype")
        if request.messages is None:
            sequences = self.sequences(request, "input")
        else:
            created = metadata.created
            sequences = self.requests.from_conversation(request, body, created=created)
        return sequences.then(
            lambda requests: Prepared(requests, request, metadata, image_bytes(requests))
        )

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the vectors in the order of the inputs."""
        request, metadata = prepared.context, prepared.metadata
        shown = as_base64 if request.encoding_format == "base64" else as_numbers
        dtype = request.output_dtype
        vectors = [self.vector(result, request) for result in results]
        num_tokens = sum(result.num_tokens for result in results)
        answer = embedding_body(
            response_id("embd", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            vectors=[
                shown(vector if dtype is None else converted(vector, dtype)) for vector in vectors
            ],
            dtype=dtype,
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))

    @property
    def prompts(self) -> Mapping[str, str]:
        """The model's prompts by their names."""
        return self._description.prompts

    def sequences(self, request: EmbeddingRequest, param: str) -> TextDraft[list[EncodingRequest]]:
        """Draft a sequence for each input, which is the field `param` of the body."""
        return self.requests.from_prompts(
            request.input or [],
            request,
            param=param,
            add_special_tokens=request.add_special_tokens is not False,
            prefix=self.requests.prompt_named(request.prompt_name),
        )

    def vector(self, result: EncodingResult, request: EmbeddingRequest) -> NDArray[np.float32]:
        """Return the vector `[D]`, cut to the requested dimensions before it is normalized."""
        vector = check_finite(result.values)[: request.dimensions]
        return normalize(vector) if self._has_length_one(request) else vector

    def _has_length_one(self, request: EmbeddingRequest) -> bool:
        wanted = request.wants_length_one
        return self._description.normalize if wanted is None else wanted

    def check_dtype(self, request: EmbeddingRequest, dtype: OutputDtype | None, param: str) -> None:
        """Reject an element type, from the field `param`, that does not fit the vectors."""
        if dtype in PACKED and (request.dimensions or self._width) % 8:
            reason = "eight dimensions are packed into a byte: set `dimensions` to a multiple of 8"
        elif dtype in {"int8", "uint8"} and not self._has_length_one(request):
            reason = "the vectors must have length 1: set `use_activation` to true"
        else:
            return
        raise RequestError(f"`{param}` cannot be '{dtype}': {reason}.", param=param)

    def check_width(self, dimensions: int | None) -> None:
        """Reject dimensions that the model was not trained for (Matryoshka)."""
        widths = self._description.matryoshka
        if dimensions is None or (widths is None and dimensions == self._width):
            return
        if dimensions > self._width:
            reason = f"this model's vectors have {self._width} dimensions"
        elif widths is None:
            reason = (
                f"this model's vectors have {self._width} dimensions and cannot be truncated;"
                " if the model supports it, pass `--hf-overrides '{\"is_matryoshka\": true}'`"
            )
        elif widths and dimensions not in widths:
            supported = ", ".join(map(str, sorted(widths)))
            reason = f"this model supports {supported}"
        else:
            return
        raise RequestError(f"`dimensions` cannot be {dimensions}: {reason}.", param="dimensions")
