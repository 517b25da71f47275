"""Several conversations in one request, as vLLM has it, and the load of a server."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.server.rig import MODEL, HeldEngine, Site, site
from tidemill.protocol.contract import Reply

PATH = "/v1/chat/completions/batch"


class LastWord(HeldEngine):
    """Answers with the last message, after those of later conversations unless it is not slow."""

    def __init__(self, *, is_slow: bool = True, max_num_seqs: int = 2) -> None:
        super().__init__(max_num_seqs)
        self.is_slow = is_slow

    async def answer(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Refuse an empty message."""
        text = body["messages"][-1]["content"]
        self.requests.append((url, body))
        if self.is_slow:
            await asyncio.sleep(0.002 * (3 - len(text)))
        if not text:
            words, param = "`messages.0.content` must not be empty.", "messages.0.content"
            error = {"message": words, "type": "t", "param": param, "code": "c"}
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
    """It says which conversation is wrong, and conversations that wait do not start."""
    async with site(engine=LastWord()) as place:
        status, body = await post(place, messages=conversations("a", "", *["wait"] * 50))
    message = "Conversation 1: `messages.1.0.content` must not be empty."
    assert (status, body["error"]["message"]) == (400, message)
    assert body["error"]["param"] == "messages.1.0.content"
    assert len(place.engine.requests) < 8


async def test_few_conversations_are_in_the_engine_at_once() -> None:
    """They are twice as many as it runs."""
    async with site(engine=LastWord(max_num_seqs=2)) as place:
        posting = asyncio.create_task(post(place, messages=conversations(*["wait"] * 40)))
        await place.engine.has_request.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        num_started = len(place.engine.requests)
        place.engine.go.set()
        status, body = await posting
    assert (status, num_started, len(body["choices"])) == (200, 4, 40)


@pytest.mark.parametrize("max_num_seqs", [1, 512])
async def test_other_requests_have_turns_during_a_batch(max_num_seqs: int) -> None:
    """The event loop never starts more than a few dozen conversations in one turn."""
    engine = LastWord(is_slow=False, max_num_seqs=max_num_seqs)
    num_started = [0]

    async def count() -> None:
        while True:
            num_started.append(len(engine.requests))
            await asyncio.sleep(0)

    async with site(engine=engine) as place:
        counting = asyncio.create_task(count())
        status, _ = await post(place, messages=conversations(*["a"] * 500))
        counting.cancel()
    assert (status, num_started[-1]) == (200, 500)
    assert max(after - before for before, after in pairwise(num_started)) <= 64


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"messages": [[]] * 2_049}, "1 to 2,048 conversations, each a list of messages; got 2,04"),
        ({"messages": [[]] * 2_000} | {f"k{n}": 0 for n in range(5_000)}, "256 fields; got 5,00"),
    ],
)
async def test_a_batch_that_is_too_large_is_refused(wrong: dict[str, Any], words: str) -> None:
    """The error has the limit; no conversation starts."""
    async with site(engine=LastWord()) as place:
        status, body = await post(place, **wrong)
    assert (status, place.engine.requests) == (400, [])
    assert words in body["error"]["message"]


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
