"""`/v1/moderations`: texts in, OpenAI's moderation categories out, by a classifier's labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.moderation import ModerationRequest, category_of, moderation_body
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import MODERATIONS

from ..scheduling.encoding import EncodingRequest, EncodingResult
from .classification import LabelActivation
from .encoder_requests import EncoderModel, EncodingRequestBuilder
from .endpoint import Prepared, RequestMetadata
from .text_draft import TextDraft

_Prepared = Prepared[EncodingRequest, ModerationRequest]


class Moderations:
    """The endpoint of classifiers whose labels are categories of harmful texts."""

    route = MODERATIONS

    def __init__(self, model: EncoderModel) -> None:
        self._requests = EncodingRequestBuilder(model)
        self._categories = [*map(category_of, model.description.labels)]
        self._activation = LabelActivation(model.description)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence for each text."""
        return self.draft(body, metadata).read()

    def draft(self, body: dict[str, Any], metadata: RequestMetadata) -> TextDraft[_Prepared]:
        """Draft what `prepare` returns."""
        request = read_body(ModerationRequest, body)
        sequences = self._requests.from_prompts(request.input, request, param="input")
        return sequences.then(lambda requests: Prepared(requests, request, metadata))

    def finish(self, prepared: _Prepared, results: Sequence[EncodingResult]) -> Reply:
        """Return the categories of each text, in the order of the inputs."""
        metadata = prepared.metadata
        answer = moderation_body(
            response_id("modr", metadata.request_id),
            model=metadata.model,
            categories=self._categories,
            values=[self._activation.values(result) for result in results],
            is_exclusive=self._activation.is_exclusive,
        )
        return Reply(200, answer, Usage(prompt_tokens=sum(each.num_tokens for each in results)))
