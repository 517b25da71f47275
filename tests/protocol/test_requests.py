"""An engine's errors are predicted without one, with the same messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.engine.endpoints.test_transcriptions import MODEL as SPEECH
from tests.engine.scripted_model import Scene, text_model
from tidemill.engine.endpoints import speech_endpoints, text_endpoints
from tidemill.engine.endpoints.classification import Classify
from tidemill.engine.endpoints.cohere_embed import CohereEmbed
from tidemill.engine.endpoints.embeddings import Embeddings
from tidemill.engine.endpoints.moderation import Moderations
from tidemill.engine.endpoints.pooling import Pool
from tidemill.engine.endpoints.scoring import Rerank, Score
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import (
    check_request,
    interactive_priority,
    num_sequences,
    request_types,
)
from tidemill.protocol.routes import ENDPOINTS, ROUTES
from tidemill.protocol.validation import parse

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
KINDS = {kind for route in ROUTES for kind in request_types(route)}
QUESTION = {"type": "noul", "instructions": "Urgent?"}
BODIES: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": {"messages": MESSAGES},
    "CompletionRequest": {"prompt": "x"},
    "GenerativeScoringRequest": {"query": "x", "items": ["y"], "label_token_ids": [1]},
    "DecisionRequest": {
        "input": "x",
        "questions": [{"name": "a", "type": "predicate", "instructions": "Urgent?"}],
    },
    "SystemOneRequest": {"state": "x", "questions": {"a": QUESTION}},
    "CohereEmbedRequest": {"texts": ["x"]},
    "ScoreRequest": {"text_1": "x", "text_2": "y"},
    "RerankRequest": {"query": "x", "documents": ["y"]},
    "TranscriptionRequest": {"file_url": "https://example.com/a.wav"},
    "TranslationRequest": {"file_url": "https://example.com/a.wav"},
}
MANY_WRONG_VALUES: list[Any] = [
    *([value] * 1_000 for value in (1, None, "a", [], {})),
    {str(number): 1 for number in range(1_000)},
]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"stream": True, "model": "other"}),
        (CHAT, {"stream": "perhaps", "messages": MESSAGES}),
        (CHAT, {"model": "gpt-4o-mini", "tools": [{}]}),
        (CHAT, {"model": 5}),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}),
        (CHAT, {"messages": MESSAGES, "max_tokens": "8"}),
        (CHAT, {"messages": []}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/completions", {"prompt": "x", "n": 0}),
    ],
)
async def test_predicted_errors_equal_the_engines(url: str, body: dict[str, Any]) -> None:
    """There is one set of messages and one order of checks."""
    with pytest.raises(RequestError) as foretold:
        check_request(url, body, ["tiny", "tiny-alias"])
    reply = await Scene().served.respond(url, body, "req_1", 0)
    error = reply.body["error"]
    assert reply.status_code == foretold.value.status_code
    assert error["message"] == foretold.value.message
    assert (error["param"], error["code"]) == (foretold.value.param, foretold.value.code)


async def test_an_unknown_url_is_refused_with_the_supported_ones() -> None:
    """The list has all endpoints of engines, or those of the model."""
    with pytest.raises(RequestError) as foretold:
        check_request("/v1/edits", {}, ["tiny"])
    reply = await Scene().served.respond("/v1/edits", {}, "req_1", 0)
    for message in (foretold.value.message, reply.body["error"]["message"]):
        assert "/v1/edits is not supported" in message
        assert CHAT in message
    assert reply.body["error"]["code"] == foretold.value.code


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/v1/edits", {}, "url"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding"),
        ("/api/v1/score", {"text_1": "a"}, "text_1"),
        ("/score", {"query": "a"}, "documents"),
        ("/v2/rerank", {"query": "a", "documents": [], "model": "a"}, "documents"),
        ("/classify", {"input": [{"text": "a"}]}, "input.0"),
        ("/moderations", {"input": [{"type": "image_url"}]}, "input.0"),
        ("/classify", {"input": "a", "aggregation_strategy": "last"}, "aggregation_strategy"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task"),
        ("/v1/pooling", {"input": "a", "dimensions": 8}, "dimensions"),
    ],
)
def test_errors_of_other_kinds_of_models_are_predicted(
    url: str, body: dict[str, Any], param: str
) -> None:
    """The model is still unknown; an unknown URL lists the endpoints of all."""
    with pytest.raises(RequestError) as foretold:
        check_request(url, body, ["a"])
    assert foretold.value.param == param
    if param == "url":
        assert ", ".join(ENDPOINTS) in foretold.value.message


@pytest.mark.parametrize("url", [CHAT, "/completions"])
def test_a_valid_body_has_no_predicted_error(url: str) -> None:
    """Unknown fields are ignored."""
    check_request(url, {"messages": MESSAGES, "prompt": "x", "model": "any", "new": 1}, ["a", "*"])


@pytest.mark.parametrize(
    "value", [True, "1", 1.5, 2**31, 10**400, []], ids="bool text half high huge list".split()
)
@pytest.mark.parametrize("kind", sorted(KINDS, key=str))
def test_a_bad_priority_is_refused_by_name(kind: type[BaseModel], value: object) -> None:
    """It is so for every endpoint."""
    body = {**BODIES.get(kind.__name__, {"input": "x"}), "priority": value}
    with pytest.raises(RequestError, match=r"^`priority` must be .+; got .+\.$") as caught:
        parse(kind, body)
    assert (caught.value.param, caught.value.status_code) == ("priority", 400)


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"priority": 7}, 7),
        ({"priority": -3.0}, -3),
        ({"priority": None, "service_tier": "default"}, 0),
        ({"service_tier": "priority"}, -1),
        ({"service_tier": "fast", "priority": 2}, 2),
        ({"service_tier": "flex", "priority": -2}, None),
        ({"service_tier": ["flex"], "priority": "x"}, 0),
        ({"priority": 10**400}, 0),
        ({"priority": float("nan")}, 0),
    ],
)
def test_a_tier_is_a_priority(fields: dict[str, Any], priority: int | None) -> None:
    """A request of tier `flex` has none, as a row of a file; a bad priority is refused later."""
    assert interactive_priority(fields) == priority


def test_offered_endpoints_are_those_of_engines() -> None:
    """No kind of model is missing, and no endpoint is invented."""
    text = text_endpoints(text_model(), seed=0)
    pooling = (Embeddings, CohereEmbed, Score, Rerank, Classify, Moderations, Pool)
    speech = speech_endpoints(SPEECH, no_host)
    served = (*text, *pooling, *speech)
    assert sorted(endpoint.route.name for endpoint in served) == sorted(ENDPOINTS)


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_no_field_reports_an_error_for_each_of_a_thousand_values(kind: type[BaseModel]) -> None:
    """Each error takes a kilobyte, so a body of 4 MB would take gigabytes."""
    for field in kind.model_fields:
        for value in MANY_WRONG_VALUES:
            with suppress(RequestError), suppress_few_faults(field):
                kind.model_validate({field: value})


@contextmanager
def suppress_few_faults(field: str) -> Iterator[None]:
    """Suppress a validation error of up to two hundred faults."""
    num_faults = 0
    try:
        yield
    except ValidationError as error:
        num_faults = error.error_count()
    assert num_faults <= 200, field


async def no_host(url: str) -> bytes:
    """Fail, because nothing may be fetched."""
    raise AssertionError(f"{url} was fetched")


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 1),
        ({"messages": [{}, {}]}, 1),
        ({"messages": [], "n": 4}, 4),
        ({"prompt": "one text"}, 1),
        ({"prompt": [1, 2, 3], "n": 2}, 2),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1], [2]]}, 2),
        ({"input": ["a", "b"]}, 2),
        ({"input": [{"text": "a", "text_pair": "b"}] * 3}, 3),
        ({"input": [{"role": "user", "content": "a"}] * 3}, 1),
        ({"query": "q", "documents": ["a", "b", "c"]}, 3),
        ({"prompt": [], "n": 10**9}, 1),
        ({"prompt": {"a": 1}, "n": "x"}, 1),
        ({"prompt": [None], "n": True}, 1),
    ],
)
def test_sequences_of_a_body_are_counted_before_validation(
    body: dict[str, Any], count: int
) -> None:
    """Each choice of each prompt is one; errors in the body are reported later."""
    assert num_sequences(body) == count
