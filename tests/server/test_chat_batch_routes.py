"""Several conversations in one request, as vLLM has it, and the load of a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.rig import MODEL, HeldEngine, Site, site
from tidemill.protocol.contract import Reply

PATH = "/v1/chat/completions/batch"


class LastWord(HeldEngine):
    """Answers with the last message, after those of later conversations."""

    async def answer(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Refuse an empty message."""
        text = body["messages"][-1]["content"]
        self.requests.append((url, body))
        await asyncio.sleep(0.002 * (3 - len(text)))
        if not text:
            error = {"message": "No.", "type": "t", "param": None, "code": "c"}
            return Reply(400, {"error": error})
        if text == "wait":
            self.has_request.set()
            await self.go.wait()
        choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": len(text)}}
        answer = {"id": request_id, "model": MODEL, "created": created}
        return Reply(200, {**answer, "choices": [choice], "usage": usage})


def conversations(*texts: str) -> list[list[dict[str, str]]]:
    """Return a conversation for each text."""
    return [[{"role": "user", "content": text}] for text in texts]


async def post(place: Site, **body: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and body of a reply."""
    answer = await place.client.post(PATH, json={"model": MODEL, **body})
    return answer.status_code, dict(answer.json())


async def test_each_conversation_has_a_choice() -> None:
    """Choices are in the order of the conversations, and tokens are summed."""
    async with site(engine=LastWord()) as place:
        status, body = await post(place, messages=conversations("a", "bb", "ccc"), temperature=0)
    assert status == 200
    choices = [(choice["index"], choice["message"]["content"]) for choice in body["choices"]]
    assert choices == [(0, "a"), (1, "bb"), (2, "ccc")]
    assert body["usage"] == {"prompt_tokens": 15, "prompt_tokens_details": {"cached_tokens": 6}}
    assert [(url, sent["temperature"]) for url, sent in place.engine.requests] == [
        ("/v1/chat/completions", 0)
    ] * 3


async def test_one_error_is_that_of_the_request() -> None:
    """It says which conversation is wrong."""
    async with site(engine=LastWord()) as place:
        status, body = await post(place, messages=conversations("a", "", "ccc"))
    assert (status, body["error"]["message"]) == (400, "Conversation 1: No.")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": conversations("a")[0]}, "messages.0"),
        ({"messages": conversations("a"), "stream": True}, "stream"),
        ({"messages": conversations("a"), "n": 2}, "n"),
    ],
)
async def test_an_invalid_body_is_refused(wrong: dict[str, Any], param: str) -> None:
    """The error names the field."""
    async with site(engine=LastWord()) as place:
        status, body = await post(place, **wrong)
    assert (status, body["error"]["param"]) == (400, param)


async def test_the_load_is_the_number_of_requests_in_flight() -> None:
    """It counts a batch of conversations once."""
    async with site(engine=LastWord()) as place:
        assert (await place.client.get("/load")).json() == {"server_load": 0}
        posting = asyncio.create_task(post(place, messages=conversations("wait", "wait")))
        await place.engine.has_request.wait()
        assert (await place.client.get("/load")).json() == {"server_load": 1}
        place.engine.go.set()
        assert (await posting)[0] == 200
        assert (await place.client.get("/load")).json() == {"server_load": 0}
