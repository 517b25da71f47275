"""Streams: all chunks together equal the complete answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted_model import END, TURN, TURN_END, Scene, events_of
from tidemill.engine.endpoints.dispatcher import EndpointTable
from tidemill.engine.errors import EngineClosed
from tidemill.engine.scheduling.sequence import SequenceRequest, SequenceResult
from tidemill.protocol.contract import EngineStats, Reply, StreamedReply
from tidemill.protocol.errors import InternalError, RequestError
from tidemill.protocol.routes import CHAT_COMPLETIONS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
Body = dict[str, Any]

SCENE = Scene()
VOCABULARY = SCENE.model.vocab_size
MARKS = [SCENE.tokenizer.special_id(mark) for mark in (END, TURN, TURN_END)]
# Bytes of characters, alone or whole, words, and marks.
tokens = st.lists(
    st.one_of(
        st.integers(0, VOCABULARY - 1),
        st.sampled_from([mark for mark in MARKS if mark is not None]),
        st.sampled_from(SCENE.tokenizer.encode("aab é 🙂 日本", add_special_tokens=False)),
    ),
    min_size=1,
    max_size=24,
)
stops = st.lists(
    st.sampled_from(["a", "aab", "ab", "é", "🙂", "\ufffd", "b é", TURN, "capital"]),
    max_size=3,
    unique=True,
)
shared = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24)},
    optional={
        "n": st.integers(1, 3),
        "stop": stops.filter(bool),
        "stop_regex": st.sampled_from(["a+b", "[^a]{2}"]),
        "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 1),
        "return_token_ids": st.booleans(),
        "prompt_logprobs": st.integers(0, 2),
        "echo": st.booleans(),
    },
)
chats = st.fixed_dictionaries(
    {},
    optional={"logprobs": st.just(True)},  # noqa: FBT003 - hypothesis' own form
)
texts = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["The capital", ["of", "a é"], [5, 6], [[7], [8, 9]]])},
    optional={"logprobs": st.integers(0, 2)},
)


class Tellers(Scene):
    """A scene whose sequences consist of these tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__()
        self.generator.token_ids = [*token_ids]

    async def whole(self, url: str, body: Body) -> Body:
        """Return the complete answer."""
        reply = await self.served.answer(url, body, "req_1", 0)
        assert isinstance(reply, Reply)
        assert reply.status_code == 200, reply.body
        return reply.body

    async def chunks(self, url: str, body: Body, **options: bool) -> list[Body]:
        """Return all chunks."""
        reply = await self.served.answer(
            url, body | {"stream": True, "stream_options": options}, "req_1", 0
        )
        assert isinstance(reply, StreamedReply)
        return [chunk async for chunk in reply.chunks]


def merge_deltas(chunks: Sequence[Body]) -> dict[int, Body]:
    """Return the choices that the chunks consist of, each as a text completion."""
    choices: dict[int, Body] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            more = choice | choice.pop("delta", {})
            more["text"] = more.pop("content", more.get("text", ""))
            choices[choice["index"]] = _joined(choices.get(choice["index"], {}), more)
    return choices


def _joined(before: Body, more: Body) -> Body:
    joined = dict(before)
    for name, value in more.items():
        known = joined.get(name)
        if name in ("index", "role", "finish_reason", "stop_reason") or known is None:
            assert known is None or name == "index", f"{name} came twice"
            joined[name] = value
        elif isinstance(value, dict):
            joined[name] = _joined(known, value)
        elif value is not None:
            joined[name] = known + value
    return joined


@given(tokens, shared, texts)
async def test_chunks_of_texts_make_up_the_answer_at_once(
    token_ids: list[int], parameters: Body, own: Body
) -> None:
    """It covers text, log-probabilities with offsets, ids, reasons, and all requested fields."""
    scene, body = Tellers(token_ids), parameters | own
    answer = await scene.whole(TEXT, body)
    chunks = await scene.chunks(TEXT, body)
    choices = merge_deltas(chunks)
    for choice in answer["choices"]:
        assert choices[choice["index"]] == choice
    assert len(choices) == len(answer["choices"])


@given(tokens, shared, chats)
async def test_chunks_of_chats_make_up_the_answer_at_once(
    token_ids: list[int], parameters: Body, own: Body
) -> None:
    """It covers the message's text and role, log-probabilities, ids and reasons."""
    scene, body = Tellers(token_ids), {"messages": MESSAGES, **parameters, **own}
    answer = await scene.whole(CHAT, body)
    chunks = await scene.chunks(CHAT, body)
    choices = merge_deltas(chunks)
    for choice in answer["choices"]:
        message = choice.pop("message")
        merged = choices[choice["index"]]
        assert merged.pop("text") == message["content"]
        assert merged.pop("role") == message["role"]
        merged.pop("delta", None)
        if merged["logprobs"]:
            merged["logprobs"].setdefault("refusal", None)
        assert merged == choice
    assert len(choices) == len(answer["choices"])
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [chunk[name] for chunk in chunks if name in chunk] == [
            answer[name] for _ in range(name in answer)
        ]


@given(tokens, stops.filter(bool))
async def test_no_part_of_a_stop_string_is_ever_sent(token_ids: list[int], stop: list[str]) -> None:
    """The text so far never contains one, or half of a character."""
    body = {"prompt": "The", "stop": stop, "max_tokens": 24}
    whole = (await Tellers(token_ids).whole(TEXT, body))["choices"][0]["text"]
    text = ""
    for chunk in await Tellers(token_ids).chunks(TEXT, body):
        text += chunk["choices"][0]["text"]
        assert whole.startswith(text)


async def test_a_partial_stop_string_is_sent_late() -> None:
    """Its beginning waits for the text that refutes it."""
    ids = [SCENE.tokenizer.encode(char, add_special_tokens=False)[0] for char in "xaaayz"]
    body = {"prompt": "The", "stop": ["aab"], "max_tokens": 6}
    chunks = await Tellers(ids).chunks(TEXT, body)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x", "a", "aay", "z"]


async def test_choices_wait_for_the_scores_of_their_prompt() -> None:
    """Only the first choice computes them; the second, which comes first here, has them too."""
    scene = Tellers([100, 101])

    async def stream(requests: Sequence[SequenceRequest]) -> Any:
        events = [*events_of(requests, scene.generator.results(requests))]
        for place, event in sorted(events, key=lambda event: -event[0]):
            yield place, event

    scene.generator.stream = stream  # type: ignore[method-assign]
    body = {"prompt": "The", "n": 2, "max_tokens": 2, "logprobs": 1, "echo": True}
    answer = await scene.whole(TEXT, body)
    choices = merge_deltas(await scene.chunks(TEXT, body))
    assert [choices[0], choices[1]] == answer["choices"]


@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_usage_comes_last_on_request(url: str) -> None:
    """Other chunks have null usage, like OpenAI's; by default there is no such field."""
    body = {"messages": MESSAGES} if url == CHAT else {"prompt": "The"}
    plain = await Tellers([5, 6]).chunks(url, body | {"max_tokens": 2, "n": 2})
    assert not any("usage" in chunk for chunk in plain)
    *chunks, last = await Tellers([5, 6]).chunks(
        url, body | {"max_tokens": 2, "n": 2}, include_usage=True
    )
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    answer = await Tellers([5, 6]).whole(url, body | {"max_tokens": 2, "n": 2})
    assert last["usage"] == answer["usage"]
    assert last["usage"]["completion_tokens"] == 4


async def test_usage_so_far_can_be_had_with_every_chunk() -> None:
    """The option is vLLM's."""
    chunks = await Tellers([100, 101, 102]).chunks(
        TEXT, {"prompt": [5], "max_tokens": 3}, continuous_usage_stats=True
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "maybe"}, "stream"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
        ({"stream": True, "max_tokens": 0}, "max_tokens"),
        ({"stream": True, "model": "other"}, "model"),
    ],
)
async def test_a_stream_is_validated_before_it_begins(fields: Body, param: str) -> None:
    """The error is a reply with its status, and not in the stream."""
    reply = await Scene().served.answer(CHAT, {"messages": MESSAGES} | fields, "req_1", 0)
    assert isinstance(reply, Reply)
    assert reply.status_code in (400, 404)
    assert reply.body["error"]["param"] == param


async def test_a_request_that_the_engine_rejects_is_not_streamed() -> None:
    """For example, it needs more pages than exist."""
    scene = Scene()
    scene.generator.failure = RequestError("too long", param="max_tokens", code="kv_cache_exceeded")
    reply = await scene.served.answer(CHAT, {"messages": MESSAGES, "stream": True}, "req_1", 0)
    assert isinstance(reply, Reply)
    assert (reply.status_code, reply.body["error"]["code"]) == (400, "kv_cache_exceeded")


class Failing(Scene):
    """A scene that streams two tokens and then fails."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.is_left = False

        async def stream(requests: Sequence[SequenceRequest]) -> Any:
            result = SequenceResult([100, 101, 102], "length")
            events = events_of(requests, [result])
            try:
                yield next(events)
                yield next(events)
                raise failure
            finally:
                self.is_left = True

        self.generator.stream = stream  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("failure", "sent_code"),
    [
        (InternalError("broken", code="out_of_memory"), "out_of_memory"),
        (EngineClosed("gone"), "internal_error"),
        (ValueError("no"), "internal_error"),
    ],
)
async def test_a_stream_that_fails_ends_with_the_error(failure: Exception, sent_code: str) -> None:
    """Sent chunks stay valid; the error follows in OpenAI's format, and nothing else."""
    reply = await Failing(failure).served.answer(
        TEXT, {"prompt": "The", "stream": True}, "req_1", 0
    )
    assert isinstance(reply, StreamedReply)
    *chunks, last = [chunk async for chunk in reply.chunks]
    assert len(chunks) == 2
    assert last["error"]["code"] == sent_code


async def test_closing_a_stream_drops_its_work() -> None:
    """It also holds before the first chunk is read."""
    scene = Failing(ValueError("never"))
    reply = await scene.served.answer(TEXT, {"prompt": "The", "stream": True}, "req_1", 0)
    assert isinstance(reply, StreamedReply)
    assert not scene.is_left
    await reply.chunks.aclose()
    assert scene.is_left


async def test_an_endpoint_without_streams_rejects_them_by_name() -> None:
    """No endpoint imitates a stream."""
    scene = Scene()
    type_without = type("Plain", (), {"route": CHAT_COMPLETIONS})
    scene.served._online = EndpointTable([type_without()])
    reply = await scene.served.answer(CHAT, {"messages": MESSAGES, "stream": True}, "req_1", 0)
    assert isinstance(reply, Reply)
    assert (reply.status_code, reply.body["error"]["param"]) == (400, "stream")
    assert scene.generator.stats() == EngineStats()
