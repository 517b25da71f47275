"""Several engines behind a server: who gets a request, what a death costs, and equal answers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from tidemill.engine_process.exchange import (
    ExchangeRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from tidemill.engine_process.served_replicas import ServedReplicas, prefix_number
from tidemill.protocol.contract import EngineError, Reply, StreamedReply, Usage

SCRIPT = Path(__file__).with_name("scripted_engine.py")
PATIENCE_SECONDS = 60


@contextmanager
def replicas(*engines: tuple[str, ...]) -> Iterator[ServedReplicas]:
    """Start engines with these arguments."""
    commands = [
        [sys.executable, str(SCRIPT), "--stats-seconds", "0.05", *arguments]
        for arguments in engines
    ]
    served = ServedReplicas(commands, log=print)
    try:
        yield served
    finally:
        if served._thread.is_alive:
            served.close()


async def until(condition: Any) -> None:
    """Wait for what another process does."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - it is in another thread
            await asyncio.sleep(0.02)


async def ask(served: ServedReplicas, **body: Any) -> Reply | StreamedReply:
    """Ask an interactive request."""
    return await served.answer("/v1/x", body, "req_1", 7)


async def chunks_of(reply: Reply | StreamedReply) -> list[dict[str, Any]]:
    """Return all chunks of a stream."""
    assert isinstance(reply, StreamedReply)
    return [chunk async for chunk in reply.chunks]


def requests_of(path: Path) -> list[str]:
    """Return the requests that an engine began, by its log."""
    notes = [note.split("\t") for note in path.read_text().splitlines()]
    return [name for name, event, _ in notes if event == "started"]


def test_requests_and_replies_cross_processes_whole() -> None:
    """They may contain files (bytes), and fields in addition to the body."""
    request = ExchangeRequest(
        "/v1/x", {"a": [1.5, None, "é"], "file": b"\x00\xff", "b": {}}, "req_1"
    )
    assert decode_request(encode_request(request)) == request
    deep = from_json(b'{"a":' * 200 + b"1" + b"}" * 200)  # as deep as the parser allows
    assert decode_request(encode_request(request._replace(body=deep))).body == deep
    usage = Usage(1, 2, 3, 0.1, 4)
    reply = Reply(200, {"a": 0.1}, usage, bare_message=True, is_long=True, is_reused=True)
    assert decode_reply(encode_reply(reply)) == reply


async def test_answers_are_those_of_the_engine() -> None:
    """Whole ones, errors, lines of files, streams, and what went wrong on the way."""
    with replicas((), ()) as served:
        assert served.info().max_num_seqs == 2 * 64
        reply = await ask(served, say="é")
        assert isinstance(reply, Reply)
        assert reply.body == {"id": "req_1", "created": 7, "echo": {"say": "é"}}
        assert reply.usage == Usage(10, 4, 3)
        failed = await served.respond("/v1/x", {"status": 400}, "req_1", 7)
        assert (failed.status_code, failed.body["error"]["message"]) == (
            400,
            "The body requested this error.",
        )
        *chunks, last = await chunks_of(await ask(served, stream=3))
        assert chunks == [{"number": number} for number in range(3)]
        assert last["echo"] == {"stream": 3}
        with pytest.raises(RuntimeError, match="ValueError: as requested"):
            await ask(served, **{"raise": "as requested"})
        await until(lambda: served.stats().steps >= 3)


async def test_a_request_that_is_left_is_dropped() -> None:
    """Whole or streamed: the engine runs it no further."""
    with replicas((), ()) as served:
        waiting = asyncio.create_task(ask(served, wait=PATIENCE_SECONDS))
        await until(lambda: served.stats().running == 1)
        waiting.cancel()
        await until(lambda: served.stats().running == 0)
        reply = await ask(served, stream=1, wait=PATIENCE_SECONDS)
        assert isinstance(reply, StreamedReply)
        assert await anext(reply.chunks) == {"number": 0}
        await until(lambda: served.stats().running == 1)
        await reply.chunks.aclose()
        await until(lambda: served.stats().running == 0)


async def test_a_stream_that_is_left_before_its_first_chunk_is_dropped() -> None:
    """A client may disconnect while the headers are sent."""
    with replicas((), ()) as served:
        reply = await ask(served, stream=1, wait=10 * PATIENCE_SECONDS)
        assert isinstance(reply, StreamedReply)
        await until(lambda: served.stats().running == 1)
        await reply.chunks.aclose()
        await until(lambda: served.stats().running == 0)


async def test_a_prompt_of_many_parts_holds_no_loop() -> None:
    """Empty texts, of which none ends the search for the first characters."""
    with replicas((), ()) as served:
        asking = asyncio.create_task(ask(served, prompt=[""] * 1_000_000, status=400))
        longest, last = 0.0, time.thread_time()
        while not asking.done():
            await asyncio.sleep(0)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
        assert isinstance(asking.result(), Reply)
        assert longest < 0.2


async def test_requests_of_an_engine_that_dies_run_elsewhere(tmp_path: Path) -> None:
    """Requests without streamed output run again, and the engine is restarted."""
    with replicas((), ()) as served:
        others = [asyncio.create_task(ask(served, wait=0.5, say=n)) for n in range(8)]
        await until(lambda: served.stats().running == 8)
        reply = await ask(served, die_once=str(tmp_path / "died"))
        assert isinstance(reply, Reply)
        assert reply.status_code == 200
        for number, one in enumerate(others):
            other = await one
            assert isinstance(other, Reply)
            assert other.body["echo"]["say"] == number
        await until(lambda: len(served._pool._replicas.ready) == 2)


async def test_a_stream_whose_engine_dies_ends_with_an_error(tmp_path: Path) -> None:
    """A partly sent stream cannot be repeated; a later request is answered."""
    with replicas((), ()) as served:
        reply = await ask(served, stream=2, die_once=str(tmp_path / "died"))
        *chunks, last = await chunks_of(reply)
        assert chunks == [{"number": 0}, {"number": 1}]
        assert last["error"]["message"] == "The engine has stopped."
        assert isinstance(await ask(served), Reply)


async def test_a_request_that_ends_engines_is_given_up() -> None:
    """It gets its own error, and the engines go on."""
    with replicas((), ()) as served:
        reply = await ask(served, die=True)
        assert isinstance(reply, Reply)
        assert (reply.status_code, reply.body["error"]["code"]) == (500, "engine_died")
        assert isinstance(await ask(served), Reply)


async def test_a_line_of_a_file_that_ends_engines_costs_no_other_its_row() -> None:
    """Lines that ran at the same time run again without it."""
    with replicas((), ()) as served:
        bodies: list[dict[str, Any]] = [{"die": 1, "wait": 0.1}, *[{"wait": 0.5}] * 12]
        lines = (served.respond("/v1/x", body, "req_1", 7) for body in bodies)
        killed, *others = await asyncio.gather(*lines)
        assert killed.body["error"]["code"] == "engine_died"
        assert {other.status_code for other in others} == {200}


async def test_requests_that_end_engines_do_not_end_the_server() -> None:
    """A client may even repeat such a request: restarted engines count as healthy."""
    with replicas(("--endpoint", "/v1/completions"), ("--endpoint", "/v1/completions")) as served:
        for _ in range(4):
            reply = await ask(served, die=True)
            assert isinstance(reply, Reply)
            assert reply.status_code == 500
        assert isinstance(await ask(served), Reply)


async def test_an_engine_that_dies_of_a_known_line_is_not_started_again(tmp_path: Path) -> None:
    """Its machine is broken: no request is tried there again."""
    with (
        replicas(
            ("--endpoint", "/v1/completions", "--ill-after", str(tmp_path / "died"))
        ) as served,
        pytest.raises(
            EngineError, match="no engine is left: it exited while running the canary line"
        ),
    ):
        await ask(served, die_once=str(tmp_path / "died"))


async def test_requests_interrupted_by_a_close_are_not_blamed() -> None:
    """They get the error of a stopped engine, and no engine is restarted for them."""
    with replicas((), ()) as served:
        waiting = asyncio.create_task(ask(served, wait=10 * PATIENCE_SECONDS))
        await until(lambda: served.stats().running == 1)
        await asyncio.to_thread(served.close)
        with pytest.raises(EngineError, match="closed"):
            await waiting
        assert sum(one.restarts.length for one in served._pool._replicas.all) == 0


async def test_engines_that_keep_ending_end_the_server() -> None:
    """`stats`, which the server watches, raises as it does for a single engine."""
    with replicas((), ()) as served:
        with pytest.raises(EngineError, match="engines keep exiting"):
            await ask(served, fail="the device is gone", machine=True)
        with pytest.raises(EngineError, match="engines keep exiting"):
            served.stats()


def test_an_engine_that_cannot_load_is_reported() -> None:
    """The error quotes the engine, and no process is left."""
    with (
        pytest.raises(EngineError, match="no weights here"),
        replicas((), ("--refuse", "no weights here")),
    ):
        raise AssertionError


async def test_requests_that_begin_alike_go_to_one_engine(tmp_path: Path) -> None:
    """They do while it has only a little more work than the other engine."""
    logs = [tmp_path / name for name in "ab"]
    with replicas(*(("--log", str(log), "--slots", "8") for log in logs)) as served:
        prompts = [f"{number}" * 600 for number in range(6)]
        for round_ in range(3):
            for prompt in prompts:
                await ask(served, prompt=f"{prompt} {round_}", custom_id=prompt[0])
        first, second = map(requests_of, logs)
        assert not set(first) & set(second)
        assert len(first + second) == 18
        await asyncio.gather(
            *(ask(served, prompt="alike", custom_id="alike", wait=0.1) for _ in range(16))
        )
        assert all("alike" in requests_of(log) for log in logs)


def test_prompts_that_begin_alike_have_one_number() -> None:
    """Whatever comes behind their first 512 characters, in messages as in texts."""
    system = {"role": "system", "content": "s" * 600}
    chats = [{"messages": [system, {"role": "user", "content": text}]} for text in "ab"]
    assert prefix_number(chats[0]) == prefix_number(chats[1])
    assert prefix_number({"prompt": "a"}) != prefix_number({"prompt": "b"})
    assert prefix_number({"prompt": [1, 2]}) != prefix_number({"prompt": [12]})
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    assert prefix_number(parts) == prefix_number({**parts, "temperature": 1})
    assert prefix_number({}) == prefix_number({"prompt": None})
