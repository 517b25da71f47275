"""Anthropic's Messages API over the chats of an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tests.server.rig import MODEL, site
from tidemill.server.message_routes import message_events

BODY = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
ANSWER = {
    "id": "chatcmpl-7",
    "model": MODEL,
    "choices": [{"index": 0, "message": {"content": "Ho"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
}
ERROR = {"error": {"message": "No.", "type": "t", "param": None, "code": "c"}}


async def test_a_message_is_a_chat() -> None:
    """The engine gets the chat, and the client the message."""
    async with site() as place:
        answer = await place.client.post(
            "/v1/messages", json={**BODY, "system": "S", "reply": ANSWER}
        )
    assert answer.status_code == 200
    assert answer.json()["content"] == [{"type": "text", "text": "Ho"}]
    [(url, body)] = place.engine.requests
    assert url == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "S"}, *BODY["messages"]]


async def test_tokens_are_counted_by_the_tokenizer() -> None:
    """Without the model's run."""
    async with site() as place:
        sent = {**BODY, "stream": True, "reply": {"count": 7}}
        answer = await place.client.post("/v1/messages/count_tokens", json=sent)
    assert answer.json() == {"input_tokens": 7}
    [(url, body)] = place.engine.requests
    assert (url, body["messages"]) == ("/tokenize", BODY["messages"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        ({"reply": ERROR, "status": 400}, 400, "invalid_request_error"),
        ({"reply": ERROR, "status": 400, "stream": True}, 400, "invalid_request_error"),
        ({"bug": True}, 500, "api_error"),
        ([], 400, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropics_form(path: str, sent: Any, status: int, kind: str) -> None:
    """The engine, the body and the server can fail."""
    async with site() as place:
        sent = {**BODY, **sent} if isinstance(sent, dict) else sent
        answer = await place.client.post(path, json=sent)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (status, "error", kind)


async def test_an_error_has_the_place_in_the_request() -> None:
    """The chat has the system prompt as its first message."""
    error = {**ERROR["error"], "message": "`messages.1.content` is bad."}
    async with site() as place:
        sent = {**BODY, "system": "S", "reply": {"error": error}, "status": 400}
        answer = await place.client.post("/v1/messages", json=sent)
    assert answer.json()["error"]["message"] == "`messages.0.content` is bad."


async def test_the_key_may_be_in_anthropics_header() -> None:
    """A missing or wrong one is an error in its form; so is an unknown path."""
    async with site(api_keys=("k",)) as place:
        sent = {**BODY, "reply": ANSWER}
        answers = [
            await place.client.post("/v1/messages", json=sent, headers=headers)
            for headers in ({"x-api-key": "k"}, {"x-api-key": "bad"}, {})
        ]
        gone = await place.client.get("/v1/messages/gone", headers={"x-api-key": "k"})
    assert [answer.status_code for answer in answers] == [200, 401, 401]
    assert answers[1].json()["error"]["type"] == "authentication_error"
    assert gone.json()["error"]["type"] == "not_found_error"


async def events_of(*chunks: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the events of a stream; each is sent under its name."""

    async def stream() -> AsyncGenerator[dict[str, Any], None]:
        for each in chunks:
            yield {"id": "chatcmpl-7", "model": "m", **each}

    found = []
    async for event in message_events(stream()):
        name, data = event.decode().removesuffix("\n\n").split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def chunk(delta: dict[str, Any], reason: str | None = None, tokens: int = 1) -> dict[str, Any]:
    """Return a chunk of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    usage = {"prompt_tokens": 5, "completion_tokens": tokens}
    return {"choices": [choice], "usage": usage}


async def test_a_streamed_chat_becomes_events() -> None:
    """Reasoning, text and calls are blocks; the input's tokens come first, and the stop last."""
    call = {"index": 0, "id": "t1", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    events = await events_of(
        chunk({"role": "assistant", "content": ""}, tokens=0),
        chunk({"reasoning": "Hm"}),
        chunk({"reasoning": "."}),
        chunk({"content": "Hi"}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [more]}),
        chunk({}, "tool_calls", 6),
    )
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta"),
        "content_block_stop",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    starts = [event["content_block"] for event in events if "content_block" in event]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
    ]
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 3 + [2] * 3
    assert events[9]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6


@pytest.mark.parametrize(
    ("reason", "stop_reason"), [("tool_calls", "end_turn"), ("length", "max_tokens")]
)
async def test_a_streamed_call_without_a_complete_object_is_a_text(
    reason: str, stop_reason: str
) -> None:
    """The whole message has the same blocks; text after the call is another one."""
    call = {"index": 0, "id": "t1", "function": {"name": "f", "arguments": '{"a": '}}
    events = await events_of(
        chunk({"tool_calls": [call]}), chunk({"content": "Hi"}), chunk({}, reason)
    )
    starts = [event["content_block"] for event in events if "content_block" in event]
    assert starts == [{"type": "text", "text": ""}] * 2
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["text"] for delta in deltas] == ['f {"a": ', "Hi"]
    assert events[-2]["delta"]["stop_reason"] == stop_reason


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"type": "invalid_request_error", "code": "c"}, "invalid_request_error"),
        ({"type": "server_error", "code": "engine_died"}, "overloaded_error"),
        ({"type": "server_error", "code": "internal"}, "api_error"),
        ({"type": "other", "code": None}, "api_error"),
    ],
)
async def test_an_error_ends_a_stream(error: dict[str, Any], kind: str) -> None:
    """It is the last event, with the type of a whole reply's error."""
    events = await events_of(chunk({"content": "Hi"}), {"error": {**error, "message": "No."}})
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert events[-1]["error"] == {"type": kind, "message": "No."}
