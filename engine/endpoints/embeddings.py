"""`/v1/embeddings`: texts in, a vector for each out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.contract import Reply, Usage
from engine.endpoints.encodings import EncoderModel, Encodings
from engine.endpoints.endpoint import Heading, Prepared
from engine.endpoints.vectors import as_base64, as_numbers, at_length_one, checked
from engine.protocol.bodies import response_id
from engine.protocol.embeddings import EmbeddingRequest, embedding_body
from engine.protocol.errors import RequestError
from engine.protocol.requests import read_body
from engine.protocol.routes import EMBEDDINGS
from engine.scheduling.encoding import EncodingRequest, EncodingResult

_Prepared = Prepared[EncodingRequest, EmbeddingRequest]


class Embeddings:
    """The endpoint of any model that gives vectors."""

    route = EMBEDDINGS

    def __init__(self, model: EncoderModel) -> None:
        self._encodings = Encodings(model)
        self._description = model.description
        self._width = model.width

    def prepare(self, body: dict[str, Any], heading: Heading) -> _Prepared:
        """Return a sequence for each input, or for the conversation."""
        request = read_body(EmbeddingRequest, body)
        self._check_width(request.dimensions)
        return Prepared(self._sequences(request, heading.created), request, heading)

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the vectors in the order of their inputs."""
        request, heading = prepared.context, prepared.heading
        shown = as_base64 if request.encoding_format == "base64" else as_numbers
        num_tokens = sum(result.num_tokens for result in results)
        answer = embedding_body(
            response_id("embd", heading.request_id),
            created=heading.created,
            model=heading.model,
            vectors=[shown(self._vector(result, request)) for result in results],
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))

    def _sequences(self, request: EmbeddingRequest, created: int) -> list[EncodingRequest]:
        if request.messages is not None:
            text = self._encodings.rendered(
                request.messages,
                created=created,
                add_generation_prompt=bool(request.add_generation_prompt),
                continue_final_message=bool(request.continue_final_message),
                variables=request.chat_template_kwargs,
            )
            # Templates write the tokens that open a text themselves, so none are added by default.
            return self._encodings.of_prompts(
                [text],
                request,
                param="messages",
                add_special_tokens=bool(request.add_special_tokens),
            )
        return self._encodings.of_prompts(
            request.input or [],
            request,
            param="input",
            add_special_tokens=request.add_special_tokens is not False,
            prefix=self._encodings.prompt_of(request.prompt_name),
        )

    def _vector(self, result: EncodingResult, request: EmbeddingRequest) -> NDArray[np.float32]:
        """Return the vector `[D]`, cut to the dimensions that are asked for before it is scaled."""
        vector = checked(result.values)[: request.dimensions]
        wanted = request.wants_length_one
        is_scaled = self._description.normalize if wanted is None else wanted
        return at_length_one(vector) if is_scaled else vector

    def _check_width(self, dimensions: int | None) -> None:
        """Refuse to cut vectors that mean nothing when they are cut."""
        widths = self._description.matryoshka
        if dimensions is None or (widths is None and dimensions == self._width):
            return
        if widths is None:
            why = (
                f"this model's vectors have {self._width} dimensions and are not made to be cut;"
                " where they are, `--hf-overrides '{\"is_matryoshka\": true}'` says so"
            )
        elif dimensions > self._width:
            why = f"this model's vectors have {self._width} dimensions"
        elif widths and dimensions not in widths:
            told = ", ".join(map(str, sorted(widths)))
            why = f"this model's vectors may be cut to {told}"
        else:
            return
        raise RequestError(f"`dimensions` cannot be {dimensions}: {why}.", param="dimensions")
