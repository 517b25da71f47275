"""The engine's part of a new endpoint: a class with a route and two functions.

`CONTRIBUTING.md` links here and lists the other places that name every endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.scripted_model import (
    CREATED,
    INFO,
    METADATA,
    Scene,
    ScriptedGenerator,
    text_model,
)
from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.endpoint import Prepared, RequestMetadata
from tidemill.engine.scheduling.sequence import SequenceRequest, SequenceResult
from tidemill.engine.text.tokenizer import Tokenizer
from tidemill.protocol.contract import Reply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.routes import Route

URL = "/v1/likelihood"

_Prepared = Prepared[SequenceRequest, None]


class Likelihood:
    """How likely the model finds a text: the sum of its tokens' log-probabilities."""

    route = Route(URL, "a model of likelihoods", exact=frozenset({URL}))

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self, body: dict[str, Any], metadata: RequestMetadata) -> _Prepared:
        """Return a sequence that scores its prompt and generates nothing."""
        text = body.get("text")
        if not isinstance(text, str) or not text:
            raise RequestError("`text` must be a text that is not empty.", param="text")
        ids = self._tokenizer.encode(text, add_special_tokens=True)
        return Prepared([SequenceRequest(ids, max_tokens=0, prompt_logprobs=0)], None, metadata)

    def finish(self, prepared: _Prepared, results: Sequence[SequenceResult]) -> Reply:
        """Return the sum; nothing predicts the first token."""
        [result] = results
        likelihood = sum(entry.logprob for entry in result.prompt_logprobs or [] if entry)
        body = {"id": prepared.metadata.request_id, "likelihood": likelihood}
        return Reply(200, body, Usage(prompt_tokens=len(prepared.requests[0].prompt_ids)))


MODEL = text_model()
ENDPOINTS = (*text_endpoints(MODEL, seed=0), Likelihood(MODEL.tokenizer))


def served() -> Dispatcher:
    """Return an engine that answers one more URL."""
    return Dispatcher(ENDPOINTS, ScriptedGenerator([5]), INFO, model_names=["tiny"])


def test_each_side_is_tested_by_itself() -> None:
    """The requests to the engine and the body of its results need no loop and no engine."""
    endpoint = Likelihood(MODEL.tokenizer)
    prepared = endpoint.prepare({"text": "Paris"}, METADATA)
    [request] = prepared.requests
    assert MODEL.tokenizer.text(request.prompt_ids) == "Paris"
    reply = endpoint.finish(prepared, ScriptedGenerator([]).results(prepared.requests))
    assert reply.body["likelihood"] == pytest.approx(-sum(request.prompt_ids[1:]) / 100)
    assert reply.usage.prompt_tokens == len(request.prompt_ids)


async def test_it_is_answered_on_the_common_path() -> None:
    """It has a reply, or an error in the common format; other URLs do not change."""
    engine = served()
    reply = await engine.respond(URL, {"text": "Paris"}, "req_1", CREATED)
    assert (reply.status_code, reply.body["id"]) == (200, "req_1")
    reply = await engine.respond(URL, {"text": 5}, "req_2", CREATED)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "text")
    reply = await engine.respond("/v1/completions", {"prompt": "Paris"}, "req_3", CREATED)
    assert reply.status_code == 200


async def test_it_is_listed_with_the_others() -> None:
    """Only an engine that has it lists it."""
    for engine, status in ((served(), 200), (Scene().served, 400)):
        reply = await engine.respond(URL, {"text": "Paris"}, "req_1", CREATED)
        assert reply.status_code == status
        reply = await engine.respond("/v1/unknown", {}, "req_1", CREATED)
        assert (URL in reply.body["error"]["message"]) == (status == 200)
