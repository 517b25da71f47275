"""`/pooling`: the numbers of texts, or of their tokens, from any model of vectors or labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.pooling import PoolRequest, PoolTask, pooling_body
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import POOLING

from ..model.encoders.pooling_config import PoolingConfig
from ..scheduling.encoding import EncodingRequest, EncodingResult
from .classification import LabelActivation
from .encoder_requests import EncoderModel, EncodingRequestBuilder
from .endpoint import Prepared, RequestMetadata
from .text_draft import TextDraft
from .vectors import as_base64, as_numbers, check_finite, normalize, softmax

MAX_NUMBERS, MAX_PACKED_NUMBERS = 20_000_000, 80_000_000
"""The most numbers in a response with a row for each token, and in one of base64.

A number takes about 50 bytes of memory, or 10 in base64.
"""

_OF_VECTORS = frozenset({"embed", "token_embed"})
_OF_TOKENS = frozenset({"token_embed", "token_classify"})
_Prepared = Prepared[EncodingRequest, PoolRequest]


def tasks_of(description: PoolingConfig) -> tuple[PoolTask, ...]:
    """Return the tasks of a model, its default first."""
    match description.task:
        case "token_classify":
            return ("token_classify",)
        case "embed":
            pooling = description.pooling
            is_joined = pooling is not None and len(pooling.modes) > 1
            # Modules after joined poolings take the numbers of several: no token has these.
            return ("embed",) if is_joined and description.modules else ("embed", "token_embed")
    return ("classify",)


class Pool:
    """The pooling endpoint of embedding models and classifiers."""

    route = POOLING

    def __init__(self, model: EncoderModel) -> None:
        self._requests = EncodingRequestBuilder(model)
        self._description = model.description
        self._tasks = tasks_of(model.description)
        self._activation = LabelActivation(model.description)
        pooling, labels = model.description.pooling, model.description.labels
        num_joined = 1 if pooling is None else len(pooling.modes)
        self._width = len(labels) or model.width // num_joined

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each input, or for the conversation."""
        return self._draft(body, metadata).read()

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared] | None:
        """Draft what `prepare` returns; None for a conversation, which is rendered first."""
        return None if body.get("messages") is not None else self._draft(body, metadata)

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the numbers in the order of the inputs."""
        request, metadata = prepared.context, prepared.metadata
        shown = as_base64 if request.encoding_format == "base64" else as_numbers
        num_tokens = sum(result.num_tokens for result in results)
        answer = pooling_body(
            response_id("pool", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            values=[shown(self._values(result, request)) for result in results],
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))

    def _draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared]:
        request = read_body(PoolRequest, body)
        task = self._task(request)
        if task not in self._tasks:
            supported = " or ".join(f"'{each}'" for each in self._tasks)
            raise RequestError(
                f"`task` cannot be '{task}': this model supports {supported}.", param="task"
            )
        if request.messages is not None:
            sequences = self._requests.from_conversation(request, created=metadata.created)
        else:
            sequences = self._requests.from_prompts(
                request.input or [],
                request,
                param="input",
                add_special_tokens=request.add_special_tokens is not False,
                # Prompts are for vectors: classifiers read the text alone, as in `/v1/classify`.
                prefix=self._requests.prompt_named(None) if task in _OF_VECTORS else "",
            )

        def prepared(found: list[EncodingRequest]) -> _Prepared:
            if task in _OF_TOKENS:
                self._check_size(found, request)
            if task == "token_embed":
                found = [replace(each, wants_tokens=True) for each in found]
            return Prepared(found, request, metadata)

        return sequences.then(prepared)

    def _check_size(self, sequences: Sequence[EncodingRequest], request: PoolRequest) -> None:
        """Reject inputs whose response would not fit into memory."""
        num_tokens = sum(len(each.token_ids) for each in sequences)
        is_packed = request.encoding_format == "base64"
        most = MAX_PACKED_NUMBERS if is_packed else MAX_NUMBERS
        if num_tokens * self._width > most:
            param = "input" if request.messages is None else "messages"
            instead = "" if is_packed else ", or set `encoding_format` to 'base64'"
            raise RequestError(
                f"`{param}` has {num_tokens} tokens with {self._width} numbers each; a response "
                f"has at most {most:,} numbers. Send fewer texts per request{instead}.",
                param=param,
            )

    def _task(self, request: PoolRequest) -> PoolTask:
        return request.task or self._tasks[0]

    def _values(self, result: EncodingResult, request: PoolRequest) -> NDArray[np.float32]:
        """Return the numbers `[D]` of an input, or `[t, D]` of its tokens."""
        values, is_active = check_finite(result.values), request.use_activation
        match self._task(request):
            case "classify":
                numbers = self._activation.values(result, is_raw=is_active is False)
                return np.array(numbers, np.float32)
            case "token_classify":
                return values if is_active is False else softmax(values)
            case "embed":
                is_active = self._description.normalize if is_active is None else is_active
        return values if is_active is False else normalize(values)
