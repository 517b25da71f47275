"""`/v1/classify`: texts or pairs of texts in, a number for each label of the model out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.bodies import response_id
from tidemill.protocol.classification import ClassificationRequest, classification_body
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import CLASSIFY

from ..model.encoders.pooling_config import PoolingConfig
from ..scheduling.encoding import EncodingRequest, EncodingResult
from .encoder_requests import EncoderModel, EncodingRequestBuilder
from .endpoint import Prepared, RequestMetadata
from .scoring import ACTIVATIONS
from .text_draft import TextDraft
from .vectors import as_numbers, check_finite, softmax

Numbers = NDArray[np.float64]
_Prepared = Prepared[EncodingRequest, ClassificationRequest]


LABEL_ACTIVATIONS: Mapping[str, Callable[[Numbers], Numbers]] = MappingProxyType(
    {**ACTIVATIONS, "Softmax": softmax}
)
"""Activations of the logits of a text, by their names in torch.nn."""


class LabelActivation:
    """Turns the logits of a text into the numbers of labels, as transformers' pipeline does.

    With `is_exclusive` these are probabilities of which one label is true.
    """

    def __init__(self, description: PoolingConfig) -> None:
        is_regression = description.config.get("problem_type") == "regression"
        name = "Identity" if is_regression else description.activation
        self.is_exclusive = name == "Softmax"
        self._activate = LABEL_ACTIVATIONS[name]

    def values(self, result: EncodingResult, *, is_raw: bool = False) -> list[float]:
        """Return the number of each label; logits if `is_raw`."""
        logits = check_finite(result.values).astype(np.float64)
        values = logits if is_raw else self._activate(logits)
        return as_numbers(values.astype(np.float32))


class Classify:
    """The endpoint of classifiers, and of models with one label."""

    route = CLASSIFY

    def __init__(self, model: EncoderModel) -> None:
        self._requests = EncodingRequestBuilder(model)
        self._has_template = model.reads_pairs_by_template
        self._labels = model.description.labels
        self._activation = LabelActivation(model.description)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each text or pair, or for the conversation."""
        return self._draft(read_body(ClassificationRequest, body), body, metadata).read()

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared] | None:
        """Draft what `prepare` returns; None if its texts are rendered first."""
        request = read_body(ClassificationRequest, body)
        is_rendered = request.messages is not None or (self._has_template and request.pairs)
        return None if is_rendered else self._draft(request, body, metadata)

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the numbers of each text, in the order of the inputs."""
        request, metadata = prepared.context, prepared.metadata
        is_raw = request.use_activation is False
        num_tokens = sum(result.num_tokens for result in results)
        answer = classification_body(
            response_id("classify", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            labels=self._labels,
            values=[self._activation.values(result, is_raw=is_raw) for result in results],
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))

    def _draft(
        self, request: ClassificationRequest, body: dict[str, Any], metadata: RequestMetadata
    ) -> TextDraft[_Prepared]:
        if request.aggregation_strategy is not None:
            raise RequestError(
                "`aggregation_strategy` requires a token classifier; this one labels whole texts.",
                param="aggregation_strategy",
            )
        created = metadata.created
        if request.messages is not None:
            sequences = self._requests.from_conversation(request, body, created=created)
        elif pairs := request.pairs:
            firsts, seconds = [pair.text for pair in pairs], [pair.text_pair for pair in pairs]
            sequences = self._requests.from_pairs(
                firsts, seconds, request, param="input", created=created
            )
        else:
            sequences = self._requests.from_prompts(
                request.prompts,
                request,
                param="input",
                add_special_tokens=request.add_special_tokens is not False,
            )
        return sequences.then(lambda requests: Prepared(requests, request, metadata))
