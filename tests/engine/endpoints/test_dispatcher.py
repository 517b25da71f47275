"""The dispatcher returns one reply in OpenAI's format for every request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted_model import (
    INFO,
    METADATA,
    Scene,
    ScriptedGenerator,
    TextEndpoint,
    text_model,
)
from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.endpoints.backpressure import MAX_BYTES_AT_ONCE
from tidemill.engine.endpoints.chat import ChatCompletions
from tidemill.engine.endpoints.dispatcher import Dispatcher
from tidemill.engine.endpoints.logprob_bodies import prompt_logprobs
from tidemill.engine.scheduling.sequence import SequenceResult
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.contract import Reply, StreamedReply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.unsupported import GENERATION

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


async def reply_to(url: str, body: dict[str, Any]) -> Reply:
    """Return the reply of a fresh engine."""
    return await Scene().served.respond(url, body, "req_1", 0)


@pytest.mark.parametrize(
    ("fields", "priority"),
    [({}, 0), ({"priority": 4}, 4), ({"service_tier": "flex"}, None)],
)
@pytest.mark.parametrize("stream", [{}, {"stream": True}])
async def test_an_interactive_request_has_a_priority(
    fields: dict[str, Any], priority: int | None, stream: dict[str, bool]
) -> None:
    """All of its sequences have it; a row of a file has none, whatever its body contains."""
    scene = Scene()
    body = {"messages": MESSAGES, "n": 2, **fields}
    answer = await scene.served.answer(CHAT, body | stream, "req_1", 0)
    if isinstance(answer, StreamedReply):
        _ = [chunk async for chunk in answer.chunks]
    row = await scene.served.respond(CHAT, body, "req_2", 0)
    assert row.status_code == 200
    assert [request.priority for request in scene.generator.requests] == [
        *[priority] * 2,
        None,
        None,
    ]


async def test_the_error_of_an_unknown_url_lists_every_endpoint() -> None:
    """vLLM's dialect prints this failure as a bare message."""
    reply = await reply_to("/v1/unknown", {"stream": True, "model": "other"})
    assert reply.status_code == 400
    assert reply.bare_message
    message = reply.body["error"]["message"]
    assert "/v1/unknown" in message
    assert "/v1/chat/completions, /v1/completions" in message


@pytest.mark.parametrize(
    ("url", "needs"),
    [
        ("/v1/embeddings", "an embedding model"),
        ("/score", "a reranker or an embedding model"),
        ("/v2/rerank", "a reranker or an embedding model"),
        ("/v1/audio/transcriptions", "a speech recognition model"),
    ],
)
async def test_a_known_url_that_the_model_cannot_serve_has_its_own_error(
    url: str, needs: str
) -> None:
    """The message names the URL, the kind of model that serves it, and this model's endpoints."""
    supported = [endpoint.route.name for endpoint in text_endpoints(text_model(), seed=0)]
    reply = await reply_to(url, {"input": "x"})
    assert reply.status_code == 400
    assert not reply.bare_message
    assert reply.body["error"]["message"] == (
        f"Model does not support endpoint: {url}. It requires {needs}; this model supports "
        f"{', '.join(supported)}."
    )


@pytest.mark.parametrize("value", [True, "True", "true", 1])
async def test_a_stream_is_rejected_before_the_rest_of_the_body(value: object) -> None:
    """The wording is vLLM's, which clients look for."""
    reply = await reply_to(CHAT, {"stream": value, "model": "other"})
    assert reply.status_code == 400
    assert reply.bare_message
    assert reply.body["error"]["message"] == "Request must not be sent in stream mode"
    assert reply.body["error"]["param"] == "stream"


@pytest.mark.parametrize("value", [False, "False", None, 0])
async def test_stream_false_and_null_are_accepted(value: object) -> None:
    """Clients may send the default."""
    assert (await reply_to(CHAT, {"stream": value, "messages": MESSAGES})).status_code == 200


@pytest.mark.parametrize("value", ["maybe", 2, [], {}, 0.5])
async def test_an_invalid_stream_value_is_rejected_by_name(value: object) -> None:
    """The value is neither true nor false."""
    reply = await reply_to(CHAT, {"stream": value, "messages": MESSAGES})
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "stream")


async def test_a_model_that_is_not_served_is_not_found() -> None:
    """404 in OpenAI's form, before the rest of the body is checked."""
    reply = await reply_to(CHAT, {"model": "gpt-4o"})
    assert reply.status_code == 404
    assert reply.body["error"]["code"] == "model_not_found"
    message = "The model `gpt-4o` does not exist. Served: tiny, tiny-alias."
    assert reply.body["error"]["message"] == message


@pytest.mark.parametrize(
    ("requested", "answered"),
    [("gpt-4o-mini", "gpt-4o-mini"), ("tiny", "tiny"), ("", ""), (None, "tiny")],
)
async def test_a_star_among_the_names_runs_every_row(requested: str | None, answered: str) -> None:
    """The reply contains the request's model name, or the first proper name."""
    scene = Scene(model_names=["*", "tiny"])
    reply = await scene.served.respond(CHAT, {"model": requested, "messages": MESSAGES}, "req_1", 0)
    assert (reply.status_code, reply.body["model"]) == (200, answered)


async def test_under_a_star_a_model_must_still_be_a_name() -> None:
    """A value that is not a string is rejected."""
    scene = Scene(model_names=["tiny", "*"])
    reply = await scene.served.respond(CHAT, {"model": 5, "messages": MESSAGES}, "req_1", 0)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("requested", "adapter"),
    [("loud", 1), ("terse", 2), ("tiny", 0), (None, 0), ("whatever", 0)],
)
async def test_an_adapter_is_selected_by_its_name(requested: str | None, adapter: int) -> None:
    """With a star every other name selects the model itself; the row contains it."""
    scene = Scene(model_names=["tiny", "*"], adapters=["loud", "terse"])
    body = {"model": requested, "messages": MESSAGES, "prompt": "Hi", "n": 2}
    for url in (CHAT, "/v1/completions"):
        reply = await scene.served.respond(url, body, "req_1", 0)
        assert (reply.status_code, reply.body["model"]) == (200, requested or "tiny")
        assert [request.adapter for request in scene.generator.requests[-2:]] == [adapter] * 2


async def test_a_name_that_is_neither_the_models_nor_an_adapters_is_refused() -> None:
    """The error lists all names."""
    scene = Scene(adapters=["loud"])
    reply = await scene.served.respond(CHAT, {"model": "x", "messages": MESSAGES}, "req_1", 0)
    assert reply.status_code == 404
    assert "Served: tiny, tiny-alias, loud." in reply.body["error"]["message"]


def test_a_star_alone_is_not_a_model_name() -> None:
    """A reply must contain a name if its request has none."""
    with pytest.raises(ValueError, match="at least one model name"):
        Scene(model_names=["*"])


@pytest.mark.parametrize(("requested", "answered"), [("tiny-alias", "tiny-alias"), (None, "tiny")])
async def test_the_reply_contains_the_requested_model_name(
    requested: str | None, answered: str
) -> None:
    """Any of the served names is accepted; without one it is the first of them."""
    reply = await reply_to(CHAT, {"model": requested, "messages": MESSAGES})
    assert reply.body["model"] == answered


async def test_the_reply_contains_the_creation_time_of_its_request() -> None:
    """One engine answers the rows of many batches, each with its own time."""
    served = Scene().served
    for url, body in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "Hi"})):
        replies = [await served.respond(url, body, "req_1", created) for created in (7, 8, 7)]
        assert [reply.body["created"] for reply in replies] == [7, 8, 7]
        assert replies[0] == replies[2]


async def test_a_model_that_is_not_a_string_is_rejected() -> None:
    """A number is not a model name."""
    reply = await reply_to(CHAT, {"model": 5, "messages": MESSAGES})
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("name", ["\ud800", "x" * 10**6])
async def test_any_name_can_be_answered(name: str) -> None:
    """An error's message is valid UTF-8 of bounded length."""
    for body in ({"model": name}, {"logit_bias": {name: 1}, "messages": MESSAGES}):
        reply = await reply_to(CHAT, body)
        assert reply.status_code in {400, 404}
        assert len(json.dumps(reply.body, ensure_ascii=False).encode()) < 5_000


async def test_a_generators_refusal_is_the_requests_error() -> None:
    """A request that can never fit the cache gets its own error, with its own status."""
    scene = Scene()
    scene.generator.failure = RequestError("needs more KV cache than there is", code="too_large")
    reply = await scene.served.respond(CHAT, {"messages": MESSAGES}, "req_1", 0)
    assert (reply.status_code, reply.body["error"]["code"]) == (400, "too_large")


async def test_an_internal_error_is_a_500_with_its_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The row has a short message, the log has the traceback, and the engine continues."""
    scene = Scene()
    scene.generator.failure = ZeroDivisionError("inside the engine")
    with caplog.at_level(logging.ERROR):
        reply = await scene.served.respond(CHAT, {"messages": MESSAGES}, "req_7", 0)
    error = reply.body["error"]
    assert reply.status_code == 500
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "ZeroDivisionError" in error["message"]
    assert "req_7" in caplog.text
    assert "inside the engine" in caplog.text
    scene.generator.failure = None
    assert (await scene.served.respond(CHAT, {"messages": MESSAGES}, "req_8", 0)).status_code == 200


async def test_cancelling_a_request_is_not_a_failure() -> None:
    """A job that stops must not turn its last requests into error rows."""

    class Endless(ScriptedGenerator):
        """A generator that never ends."""

        async def generate(self, requests: object) -> list[Any]:
            """Wait forever."""
            del requests
            await asyncio.Event().wait()
            return []

    endpoints = text_endpoints(text_model(), seed=0)
    served = Dispatcher(endpoints, Endless([]), INFO, model_names=["tiny"])
    task = asyncio.create_task(served.respond(CHAT, {"messages": MESSAGES}, "req_1", 0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class SlowScene(Scene):
    """A scene that tokenizes a text of `z` when permitted, as a single token."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = asyncio.Event()
        self.go_on = threading.Event()
        self.now = self.most = 0
        self._loop = asyncio.get_running_loop()
        self._encode = self.tokenizer.encode
        self.tokenizer.encode = self._slowly  # type: ignore[method-assign]
        self.tokenizer.least_tokens = lambda _: 0  # type: ignore[method-assign]

    def long(self, num_bytes: int) -> asyncio.Task[Reply]:
        """Request the completion of a text of `num_bytes` bytes."""
        body = {"prompt": "z" * num_bytes}
        return asyncio.create_task(self.served.respond("/v1/completions", body, "req_1", 0))

    def _slowly(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not text.startswith("z"):
            return self._encode(text, add_special_tokens=add_special_tokens)
        self.now += 1
        self.most = max(self.most, self.now)
        self._loop.call_soon_threadsafe(self.has_begun.set)
        self.go_on.wait()
        self.now -= 1
        return [5]


async def test_a_long_text_does_not_hold_up_the_others() -> None:
    """Short requests finish while it is tokenized, and it gets its answer in the end."""
    scene = SlowScene()
    task = scene.long(30_000)
    await scene.has_begun.wait()
    for _ in range(3):
        reply = await scene.served.respond(CHAT, {"messages": MESSAGES}, "req_2", 0)
        assert reply.status_code == 200
    assert not task.done()
    scene.go_on.set()
    assert (await task).body["choices"][0]["text"] == " Paris."


async def test_texts_above_the_memory_limit_take_turns() -> None:
    """Each of two above the limit is tokenized alone; one that is cancelled while it waits, never.

    The memory is that of a tokenizer: 160 bytes for each byte of text.
    """
    scene = SlowScene()
    first, second, third = [scene.long(MAX_BYTES_AT_ONCE) for _ in range(3)]
    await scene.has_begun.wait()
    second.cancel()
    scene.go_on.set()
    replies = await asyncio.gather(first, second, third, return_exceptions=True)
    assert isinstance(replies[1], asyncio.CancelledError)
    assert [isinstance(reply, Reply) for reply in replies] == [True, False, True]
    assert scene.most == 1
    assert len(scene.generator.requests) == 2


@pytest.mark.parametrize(("num_tokens", "is_elsewhere"), [(100, False), (1_001, True)])
async def test_a_long_result_is_serialized_outside_the_loop(
    num_tokens: int, *, is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of thousands of tokens with their alternatives takes half a second."""
    scene = Scene()
    scene.generator.results = lambda _: [SequenceResult([5] * num_tokens, "length")]  # type: ignore[method-assign]
    finish, threads = ChatCompletions.finish, []

    def noted(*arguments: Any) -> Reply:
        threads.append(threading.get_ident())
        return finish(*arguments)

    monkeypatch.setattr(ChatCompletions, "finish", noted)
    reply = await scene.served.respond(CHAT, {"messages": MESSAGES}, "req_1", 0)
    assert reply.usage.completion_tokens == num_tokens
    assert [thread != threading.get_ident() for thread in threads] == [is_elsewhere]
    assert reply.is_long == is_elsewhere


@pytest.mark.parametrize(
    ("fields", "is_in_thread"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"stop_regex": ["a+"]}, True),
        ({"guided_regex": None}, False),
        ({}, False),
    ],
    ids=range(4),
)
async def test_a_constraint_is_always_compiled_outside_the_loop(
    fields: dict[str, Any], *, is_in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred bytes may describe an automaton of a million states."""
    prepare, threads = ChatCompletions.prepare, list[int]()

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return prepare(*arguments)

    monkeypatch.setattr(ChatCompletions, "prepare", noted)
    scene = Scene()
    for answer in (scene.served.respond, scene.served.answer):
        await answer(CHAT, {"messages": MESSAGES, **fields}, "req_1", 0)
    assert [thread != threading.get_ident() for thread in threads] == [is_in_thread] * 2


async def test_the_scores_of_a_long_prompt_are_serialized_outside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come all at once, with the first token."""
    threads: list[int] = []

    def noted(*arguments: Any) -> list[Any]:
        threads.append(threading.get_ident())
        return prompt_logprobs(*arguments)

    monkeypatch.setattr("tidemill.engine.endpoints.completions.prompt_logprobs", noted)
    for num_tokens in (2, 60):
        body = {"prompt": [5] * num_tokens, "prompt_logprobs": 1, "max_tokens": 1, "stream": True}
        reply = await Scene().served.answer("/v1/completions", body, "req_1", 0)
        assert isinstance(reply, StreamedReply)
        first, *_ = [chunk async for chunk in reply.chunks]
        assert len(first["choices"][0]["prompt_logprobs"]) == num_tokens
    assert [thread != threading.get_ident() for thread in threads] == [False, True]


async def test_it_exposes_and_closes_its_engine() -> None:
    """A caller needs no other reference."""
    scene = Scene()
    assert scene.served.info() is INFO
    await scene.served.respond("/v1/completions", {"prompt": "The capital"}, "req_1", 0)
    stats = scene.served.stats()
    assert all(stats.request_seconds_by_cause.values())
    assert replace(stats, tokenize_seconds=0, detokenize_seconds=0) == scene.generator.stats()
    scene.served.close()
    assert scene.generator.is_closed


def test_an_engine_needs_a_name() -> None:
    """Without one no request could be answered."""
    with pytest.raises(ValueError, match="name"):
        Dispatcher([], ScriptedGenerator([]), INFO, model_names=[])


JSON_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 40)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["user", "text", "\ud800", "Hi", "<|im_end|>", "strftime_now"])
)
JSON_VALUES = st.recursive(
    JSON_SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | st.just("content"), inner, max_size=4)
    ),
    max_leaves=8,
)
SERVED = sorted(
    ChatCompletionRequest.model_fields.keys()
    | CompletionRequest.model_fields.keys()
    | {"best_of", "stream", "user", "metadata"}
)
LIKELY = {
    "messages": st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "role": st.sampled_from(["user", "assistant", "system", "developer", "x"]),
                "content": st.text(max_size=8)
                | st.lists(
                    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)}),
                    max_size=3,
                ),
                "name": JSON_VALUES,
            },
        ),
        max_size=3,
    ),
    "prompt": st.text(max_size=8) | st.lists(st.integers(-1, 301), max_size=5),
    "logit_bias": st.dictionaries(st.integers(-1, 301).map(str), st.floats(-101, 101), max_size=3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(-1, 301), max_size=3),
    "model": st.sampled_from(["tiny", "tiny-alias", "other", None]),
    "n": st.integers(-1, 4),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-2, 400),
    "logprobs": st.booleans() | st.integers(0, 4),
    "top_logprobs": st.integers(0, 4),
    "prompt_logprobs": st.integers(0, 4),
    "max_tokens": st.integers(0, 20),
    "min_tokens": st.integers(0, 20),
    "seed": st.integers(),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "return_token_ids": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=2),
}
SCENE = Scene(" Paris. é€")


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid body with changes to a few known fields: most are valid, some are not."""
    body: dict[str, Any] = {"messages": MESSAGES, "prompt": "Hi"}
    for name in draw(st.lists(st.sampled_from(sorted(LIKELY)), max_size=5)):
        body[name] = draw(LIKELY[name])
    if draw(st.integers(0, 3)) == 3:
        body[draw(st.sampled_from(SERVED))] = draw(JSON_VALUES)
    if draw(st.integers(0, 9)) == 9:
        body[draw(st.sampled_from(sorted(GENERATION)))] = draw(JSON_VALUES)
    return body


@given(endpoint=st.sampled_from([SCENE.chats, SCENE.completions]), body=bodies())
def test_an_endpoint_is_a_pure_function(endpoint: TextEndpoint, body: dict[str, Any]) -> None:
    """Both functions return the same value twice, and do not change their arguments."""
    before = repr(body)
    try:
        prepared = endpoint.prepare(body, METADATA)
    except RequestError as error:
        with pytest.raises(RequestError, match=f"^{re.escape(error.message)}$"):
            endpoint.prepare(body, METADATA)
        assert repr(body) == before
        return
    prepared_repr = repr(prepared)
    assert repr(endpoint.prepare(body, METADATA)) == prepared_repr
    results = SCENE.generator.results(prepared.requests)
    results_repr = repr(results)
    assert endpoint.finish(prepared, results) == endpoint.finish(prepared, results)
    assert (repr(body), repr(prepared), repr(results)) == (before, prepared_repr, results_repr)


@given(url=st.sampled_from([CHAT, "/v1/completions"]), body=bodies())
def test_no_body_breaks_it(url: str, body: dict[str, Any]) -> None:
    """Any JSON gets 200 or a 4xx in OpenAI's format that fits any row, and never a 500."""
    reply = asyncio.run(SCENE.served.respond(url, body, "req_1", 0))
    text = json.dumps(reply.body, ensure_ascii=False, allow_nan=False)
    assert text.encode()
    if reply.status_code != 200:
        assert 400 <= reply.status_code < 500, reply.body
        assert reply.body["error"].keys() == {"message", "type", "param", "code"}
        assert reply.body["error"]["message"]
        assert not reply.usage.completion_tokens


@pytest.mark.parametrize("fields", [{"messages": MESSAGES}, {"prompt": "Hi"}])
async def test_cached_tokens_are_included_on_request(fields: dict[str, Any]) -> None:
    """Answers and streams omit them by default, so that rows do not depend on others."""
    scene = Scene()
    telling = Dispatcher(
        [scene.chats, scene.completions],
        scene.generator,
        INFO,
        model_names=["tiny"],
        shows_cached_tokens=True,
    )
    url, body = CHAT if "messages" in fields else "/v1/completions", {"model": "tiny", **fields}
    reply = await telling.respond(url, body, "req_1", 0)
    details = {"cached_tokens": reply.usage.cached_tokens}
    assert reply.body["usage"]["prompt_tokens_details"] == details
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    streamed = await telling.answer(url, streaming, "req_1", 0)
    assert isinstance(streamed, StreamedReply)
    *_, last = [chunk async for chunk in streamed.chunks]
    assert last["usage"]["prompt_tokens_details"] == details
    reply = await scene.served.respond(url, body, "req_1", 0)
    assert "prompt_tokens_details" not in reply.body["usage"]
