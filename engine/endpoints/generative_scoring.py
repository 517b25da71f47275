"""`/v1/generative_scoring`: the likelihood of given tokens after a query and each item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidemill.protocol.bodies import response_id
from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.prompts import Prompt
from tidemill.protocol.requests import read_body
from tidemill.protocol.routes import GENERATIVE_SCORING
from tidemill.protocol.scoring import GenerativeScoringRequest, generative_scoring_body

from ..scheduling.sequence import SequenceRequest, SequenceResult
from ..text.text_model import TextModel
from .endpoint import Prepared, RequestMetadata
from .generation_requests import EndpointOptions, SequenceRequestBuilder
from .request_bounds import check_prompt_tokens

_Prepared = Prepared[SequenceRequest, GenerativeScoringRequest]

# Below the log-probability of any possible token: labels that are all impossible get scores of 0.
_LEAST = -1e30
_OPTIONS = EndpointOptions(prompt_param="items", max_tokens=1, logprobs=0)


class GenerativeScoring:
    """The generative scoring endpoint of a text model."""

    route = GENERATIVE_SCORING

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._sequences = SequenceRequestBuilder(model, seed=0)

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence of one new token for each item."""
        request = read_body(GenerativeScoringRequest, body)
        size = self._model.vocab_size
        for label in request.label_token_ids:
            if label >= size:
                raise RequestError(
                    f"`label_token_ids` contains token ID {label}; token IDs of this model "
                    f"must be between 0 and {size - 1}.",
                    param="label_token_ids",
                )
        completion = CompletionRequest(
            prompt=request.items,
            temperature=0,
            logprobs=0,
            logprob_token_ids=request.label_token_ids,
            cache_salt=request.cache_salt,
        )
        has_special_tokens = request.add_special_tokens is not False
        query = self._ids(request.query, completion, add_special_tokens=has_special_tokens)
        items = [self._ids(item, completion, add_special_tokens=False) for item in request.items]
        check_prompt_tokens(len(items) * len(query) + sum(map(len, items)), "items")
        prompts = [item + query if request.item_first else query + item for item in items]
        sequences = self._sequences.build(prompts, completion, _OPTIONS, metadata=metadata)
        return Prepared(sequences, request, metadata)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the scores in the order of the items."""
        request, metadata = prepared.context, prepared.metadata
        usage = Usage(
            prompt_tokens=sum(len(sequence.prompt_ids) for sequence in prepared.requests),
            cached_tokens=sum(result.num_cached_tokens for result in results),
        )
        answer = generative_scoring_body(
            response_id("generative-scoring", metadata.request_id),
            created=metadata.created,
            model=metadata.model,
            scores=[_scores(result, request) for result in results],
            usage=metadata.usage_body(usage),
        )
        return Reply(200, answer, usage)

    def _ids(
        self, prompt: Prompt, request: CompletionRequest, *, add_special_tokens: bool
    ) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._sequences.tokenize_prompt(
            prompt, request, _OPTIONS, add_special_tokens=add_special_tokens
        )


def _scores(result: SequenceResult, request: GenerativeScoringRequest) -> list[float]:
    """Return the probability of each label, among the labels or among all tokens."""
    assert result.logprobs is not None
    [row] = result.logprobs.rows()
    assert row is not None
    logprob_of = dict(row[3])
    logprobs = np.array([logprob_of[label] for label in request.label_token_ids])
    if request.apply_softmax is False:
        scores = np.exp(logprobs)
    else:
        weights = np.exp(logprobs - max(logprobs.max(), _LEAST))
        scores = weights / max(weights.sum(), np.finfo(np.float64).tiny)
    shown: list[float] = scores.tolist()
    return shown
