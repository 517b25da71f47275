"""`/pooling`: the numbers of texts, or of their tokens, from any model of vectors or labels.

The vectors may be sparse (SPLADE, BGE-M3), or several per text (ColBERT, BGE-M3).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.pooling import PoolRequest, PoolTask, pooling_body
from tidemill.protocol.routes import POOLING

from ..model.encoders.pooling_config import PoolingConfig
from ..scheduling.encoding import EncodingOutput, EncodingRequest, EncodingResult
from .classification import LabelActivation
from .encoder_requests import (
    QUERY,
    EncoderModel,
    EncodingRequestBuilder,
    image_bytes,
)
from .endpoint import Prepared, RequestMetadata
from .image_inputs import request_with_images
from .text_draft import TextDraft
from .vectors import as_base64, as_numbers, check_finite, normalize, softmax

MAX_NUMBERS, MAX_PACKED_NUMBERS = 20_000_000, 80_000_000
"""The most numbers in a response with a row for each token, and in one of base64.

A number takes about 50 bytes of memory, or 10 in base64.
"""

MAX_PAIRS = 4_000_000
"""The most pairs of index and value in a response: a pair takes about 250 bytes of memory."""

_OF_VECTORS = frozenset({"embed", "embed_sparse", "token_embed"})
_OF_TOKENS = frozenset({"token_embed", "token_classify"})
_NOT_WORDS = ("cls_token", "eos_token", "pad_token", "unk_token")
_Prepared = Prepared[EncodingRequest, PoolRequest]


def tasks_of(description: PoolingConfig) -> tuple[PoolTask, ...]:
    """Return the tasks of a model, its default first."""
    match description.task:
        case "token_classify" | "embed_sparse" | "token_embed":
            return (description.task,)
        case "embed" if description.has_two_towers:
            return ("embed",)
        case "embed" if description.has_m3_heads:
            return ("embed", "token_embed", "embed_sparse", "token_classify")
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
        self._mode, self._skipped_ids = model.description.multi_vector, model.skipped_ids
        special = {name: token for name, (_, token) in model.special_tokens.items()}
        self._first_id, self._last_id = special.get("cls_token"), special.get("sep_token")
        # As in FlagEmbedding: these are not words.
        self._not_words = [special[name] for name in _NOT_WORDS if name in special]

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each input, or for the conversation."""
        return self._draft(body, metadata).read()

    def fetched(self, body: dict[str, Any]) -> AbstractAsyncContextManager[dict[str, Any]] | None:
        """Return the fetch of a body's images; None for a body without images."""
        return self._requests.fetched(body, PoolRequest)

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared] | None:
        """Draft what `prepare` returns; None for a conversation, which is rendered first."""
        return None if body.get("messages") is not None else self._draft(body, metadata)

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the numbers in the order of the inputs."""
        request, metadata = prepared.context, prepared.metadata
        num_tokens = sum(result.num_tokens for result in results)
        values: list[Any]
        if self._task(request) == "embed_sparse":
            values = self._sparse(prepared, results)
        else:
            shown = as_base64 if request.encoding_format == "base64" else as_numbers
            values = [
                shown(self._values(sequence, result, request))
                for sequence, result in zip(prepared.requests, results, strict=True)
            ]
        answer = pooling_body(
            response_id("pool", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            values=values,
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))

    def _draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared]:
        request = request_with_images(PoolRequest, body)
        task = self._task(request)
        if task not in self._tasks:
            supported = " or ".join(f"'{each}'" for each in self._tasks)
            raise RequestError(
                f"`task` cannot be '{task}': this model supports {supported}.", param="task"
            )
        self._check_parameters(request, task)
        if request.messages is not None:
            sequences = self._requests.from_conversation(request, body, created=metadata.created)
        else:
            sequences = self._requests.from_prompts(
                request.input or [],
                request,
                param="input",
                add_special_tokens=request.add_special_tokens is not False,
                # Prompts are for vectors: classifiers read the text alone, as in `/v1/classify`.
                prefix=self._prefix(request, task),
                is_query=self._is_query(request),
            )

        def prepared(found: list[EncodingRequest]) -> _Prepared:
            if task in _OF_TOKENS:
                self._check_size(found, request)
            elif task == "embed_sparse" and self._description.has_m3_heads:
                # A pair is of a word of the text; only the result shows those of SPLADE.
                _check_pairs(sum(len(set(each.token_ids)) for each in found), request)
            if (output := self._output(task)) != "pooled":
                found = [replace(each, output=output) for each in found]
            return Prepared(found, request, metadata, image_bytes(found))

        return sequences.then(prepared)

    def _is_query(self, request: PoolRequest) -> bool:
        return self._mode is not None and request.prompt_name == QUERY

    def _prefix(self, request: PoolRequest, task: PoolTask) -> str:
        if task not in _OF_VECTORS:
            return ""
        return self._requests.prompt_named(request.prompt_name)

    def _check_parameters(self, request: PoolRequest, task: PoolTask) -> None:
        """Reject parameters that the task does not have."""
        name = request.prompt_name
        if name is not None and task not in _OF_VECTORS:
            param, why = "prompt_name", f"the task '{task}' reads the text alone"
        elif task == "embed_sparse" and request.encoding_format == "base64":
            param, why = "encoding_format", "a sparse vector is a list of pairs"
        elif task == "embed_sparse" and request.use_activation is False:
            param, why = "use_activation", "the weights of a sparse vector are activations"
        else:
            return
        value = {"use_activation": "false"}.get(param) or f"'{getattr(request, param)}'"
        raise RequestError(f"`{param}` cannot be {value}: {why}.", param=param)

    def _output(self, task: PoolTask) -> EncodingOutput:
        if self._description.has_m3_heads and task in ("embed_sparse", "token_classify"):
            return "token_weights"
        is_own = self._description.task == "token_embed"
        return "token_vectors" if task == "token_embed" and not is_own else "pooled"

    def _check_size(self, sequences: Sequence[EncodingRequest], request: PoolRequest) -> None:
        """Reject inputs whose response would not fit into memory."""
        num_tokens = sum(len(each.token_ids) for each in sequences)
        is_packed = request.encoding_format == "base64"
        most = MAX_PACKED_NUMBERS if is_packed else MAX_NUMBERS
        has_weights = self._output(self._task(request)) == "token_weights"
        width = 1 if has_weights else self._width
        if num_tokens * width > most:
            param = "input" if request.messages is None else "messages"
            instead = "" if is_packed else ", or set `encoding_format` to 'base64'"
            raise RequestError(
                f"`{param}` has {num_tokens} tokens with {width} numbers each; a response "
                f"has at most {most:,} numbers. Send fewer texts per request{instead}.",
                param=param,
            )

    def _task(self, request: PoolRequest) -> PoolTask:
        return request.task or self._tasks[0]

    def _sparse(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> list[Any]:
        """Return the pairs of index and value of each input's sparse vector, by index."""
        found = []
        if not self._description.has_m3_heads:
            _check_pairs(sum(len(result.values) for result in results), prepared.context)
        for sequence, result in zip(prepared.requests, results, strict=True):
            values = check_finite(result.values)
            if self._description.has_m3_heads:
                indexes, weights = self._largest_by_word(sequence.token_ids, values[:, 0])
            else:
                indexes, weights = values[:, 0].astype(np.int64), values[:, 1]
            pairs = zip(indexes.tolist(), as_numbers(weights), strict=True)
            found.append([{"index": index, "value": value} for index, value in pairs])
        return found

    def _largest_by_word(
        self, token_ids: Sequence[int], weights: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the words of a text and the largest weight of each, if it is above 0."""
        ids = np.array(token_ids[len(token_ids) - len(weights) :], np.int64)
        is_word = (weights > 0) & ~np.isin(ids, self._not_words)
        words, places = np.unique(ids[is_word], return_inverse=True)
        largest = np.zeros(len(words), np.float32)
        np.maximum.at(largest, places, weights[is_word])
        return words, largest

    def _values(
        self, sequence: EncodingRequest, result: EncodingResult, request: PoolRequest
    ) -> NDArray[np.float32]:
        """Return the numbers `[D]` of an input, or `[t, D]` of its tokens."""
        values, is_active = check_finite(result.values), request.use_activation
        task = self._task(request)
        if task in _OF_TOKENS:
            values = values[self._shown_tokens(sequence, len(values), request)]
        match task:
            case "classify":
                numbers = self._activation.values(result, is_raw=is_active is False)
                return np.array(numbers, np.float32)
            case "token_classify" if self._description.has_m3_heads:
                return values if is_active is False else np.maximum(values, 0)
            case "token_classify":
                return values if is_active is False else softmax(values)
            case "embed":
                is_active = self._description.normalize if is_active is None else is_active
        return values if is_active is False else normalize(values)

    def _shown_tokens(
        self, sequence: EncodingRequest, count: int, request: PoolRequest
    ) -> NDArray[np.bool_]:
        """Return which of a sequence's last `count` tokens the response shows.

        BGE-M3 has no vector of the first token, and no weight of the first and the last one;
        ColBERT has no vectors of some words of documents.
        """
        ids = np.array(sequence.token_ids[len(sequence.token_ids) - count :])
        is_shown = np.ones(count, np.bool_)
        if self._description.has_m3_heads:
            is_shown[0] = ids[0] != self._first_id
            if self._task(request) == "token_classify":
                is_shown[-1] &= ids[-1] != self._last_id
        elif self._mode is not None and (
            not self._is_query(request) or self._mode.skips_in_queries
        ):
            is_shown = ~np.isin(ids, list(self._skipped_ids))
        return is_shown


def _check_pairs(num_pairs: int, request: PoolRequest) -> None:
    """Reject a response of sparse vectors that would not fit into memory."""
    if num_pairs > MAX_PAIRS:
        raise RequestError(
            f"The response may have {num_pairs:,} pairs of index and value; the maximum is "
            f"{MAX_PAIRS:,}. Send fewer texts per request.",
            param="input" if request.messages is None else "messages",
        )
