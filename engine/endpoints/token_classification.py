"""`/v1/classify` of token classifiers: texts in, labeled spans of each out (NER, personal data)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tidemill.protocol.bodies import response_id
from tidemill.protocol.classification import ClassificationRequest, span_body
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import CLASSIFY

from ..scheduling.encoding import EncodingRequest, EncodingResult
from ..text.text_tokens import TextTokens
from .encoder_requests import EncoderModel, EncodingRequestBuilder
from .endpoint import Prepared, RequestMetadata
from .text_draft import TextDraft
from .token_spans import SpanReader
from .vectors import check_finite, softmax


class _Texts(NamedTuple):
    request: ClassificationRequest
    tokens: list[TextTokens]


_Prepared = Prepared[EncodingRequest, _Texts]


class ClassifyTokens:
    """The endpoint of token classifiers, which labels spans of texts."""

    route = CLASSIFY
    labels_spans = True

    def __init__(self, model: EncoderModel) -> None:
        self._requests = EncodingRequestBuilder(model)
        self._spans = SpanReader(model.description.labels)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each text."""
        return self.draft(body, metadata).read()

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared]:
        """Draft what `prepare` returns."""
        request = read_body(ClassificationRequest, body)
        texts = [item for item in request.input or [] if isinstance(item, str)]
        if not texts:
            name = "input" if request.messages is None else "messages"
            raise RequestError(
                "`input` must be a text or a list of texts: this is a token classifier, which "
                "returns positions in a text.",
                param=name,
            )
        if request.use_activation is False:
            raise RequestError(
                "`use_activation` cannot be false: the scores of spans are probabilities. "
                "`/pooling` returns logits.",
                param="use_activation",
            )
        return self._requests.from_located_texts(
            texts, request, add_special_tokens=request.add_special_tokens is not False
        ).then(
            lambda located: Prepared(
                [sequence for sequence, _ in located],
                _Texts(request, [tokens for _, tokens in located]),
                metadata,
            )
        )

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the spans of each text, in the order of the inputs."""
        (request, tokens), metadata = prepared.context, prepared.metadata
        strategy = request.aggregation_strategy or "simple"
        num_tokens = sum(result.num_tokens for result in results)
        answer = span_body(
            response_id("classify", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            spans=[
                self._spans.spans(softmax(check_finite(result.values)[own.places]), own, strategy)
                for result, own in zip(results, tokens, strict=True)
            ],
            num_tokens=num_tokens,
        )
        return Reply(200, answer, Usage(prompt_tokens=num_tokens))
