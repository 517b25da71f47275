"""An engine of this process under watch: its calls end once it makes no progress."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from tidemill.engine.config import EngineConfig
from tidemill.engine.model.load_timing import downloading
from tidemill.offline.console.errors import STACKS, EngineLost
from tidemill.offline.engine.engine import loaded_engine
from tidemill.offline.engine.watched_engine import (
    EngineStalled,
    LoadClock,
    Watch,
    WatchedEngine,
)
from tidemill.protocol.contract import EngineInfo, EngineStats, Reply, StreamedReply

WAIT_SECONDS = 60
SOON = Watch(stall_seconds=0.2)


class Engine:
    """An engine whose answers come once `go` is set; `layers` grow while `is_working`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.is_working = False
        self.layers = 0
        self.is_left = asyncio.Event()
        self.closed = threading.Event()

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer a line."""
        del url, request_id, created
        await self.go.wait()
        return Reply(200, body)

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer with a stream if the body requests one."""
        if "stream" not in body:
            return await self.respond(url, body, request_id, created)
        chunks = self._chunks()
        await anext(chunks)
        return StreamedReply(chunks)

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {}
            yield {"number": 1}
            await self.go.wait()
            yield {"number": 2}
        finally:
            self.is_left.set()

    def info(self) -> EngineInfo:
        """Return that of no model."""
        return EngineInfo("m", None, "test", "cpu", 0, 4)

    def stats(self) -> EngineStats:
        """Return one layer more each time while the engine works."""
        self.layers += self.is_working
        return EngineStats(running=1, steps=1, layers=self.layers)

    def close(self) -> None:
        """Note it."""
        self.closed.set()


def ask(engine: WatchedEngine, **body: Any) -> asyncio.Task[Reply]:
    """Send a line."""
    return asyncio.create_task(engine.respond("/v1/x", body, "r", 0))


async def test_all_calls_end_with_the_reason_and_the_stacks() -> None:
    """Later calls and the statistics raise it, too; the engine is closed without a wait."""
    engine = Engine()
    with closing(WatchedEngine(engine, SOON, None)) as watched:
        calls = [ask(watched) for _ in range(3)]
        done, _ = await asyncio.wait(calls, timeout=WAIT_SECONDS)
        failures = [call.exception() for call in done]
        assert len(failures) == 3
        for failure in failures:
            assert isinstance(failure, EngineStalled)
            assert str(failure).startswith("no step has finished for 0.2 s, with 3 requests in")
            assert failure.stacks.startswith(STACKS)
        with pytest.raises(EngineStalled):
            await watched.respond("/v1/x", {}, "r", 0)
        with pytest.raises(EngineStalled):
            watched.stats()
    assert await asyncio.to_thread(engine.closed.wait, WAIT_SECONDS)


async def test_a_watchdog_that_fails_ends_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwatched the engine might hang for ever, and the guard would end a healthy process."""
    engine = Engine()

    def fail() -> EngineStats:
        raise MemoryError

    monkeypatch.setattr(engine, "stats", fail)
    with (
        closing(WatchedEngine(engine, SOON, None)) as watched,
        pytest.raises(EngineStalled, match="the watchdog failed: MemoryError"),
    ):
        await ask(watched)
    assert await asyncio.to_thread(engine.closed.wait, WAIT_SECONDS)


def test_an_engine_that_cannot_be_closed_fails_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine may refuse the thread that closes it, when every row is there."""
    watched = WatchedEngine(Engine(), Watch(), None)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        watched.close()
    assert "note: the engine cannot be closed (RuntimeError: can't start" in capsys.readouterr().err


async def test_a_layer_is_progress_and_an_idle_engine_needs_none() -> None:
    """A step may take longer than the limit, as long as its layers go on."""
    engine = Engine()
    with closing(WatchedEngine(engine, SOON, None)) as watched:
        engine.is_working = True
        call = ask(watched, say="hi")
        while engine.layers < 12:  # noqa: ASYNC110 - ticks of a thread, of which four are the limit
            await asyncio.sleep(0.01)
        engine.go.set()
        assert (await call).body == {"say": "hi"}
        engine.is_working = False
        await asyncio.sleep(0.5)  # idle for longer than the limit
        assert (await ask(watched)).status_code == 200


async def test_a_blocked_event_loop_is_not_a_hang_of_the_engine() -> None:
    """Writing rows to a full pipe blocks it, for example."""
    engine = Engine()
    with closing(WatchedEngine(engine, SOON, None)) as watched:
        call = ask(watched, say="hi")
        await asyncio.sleep(0)
        time.sleep(2)  # noqa: ASYNC251 - a blocked loop in the engine has one second
        engine.go.set()
        assert (await call).body == {"say": "hi"}


async def test_a_caller_that_leaves_is_cancelled_as_ever() -> None:
    """Only a stall becomes EngineStalled."""
    with closing(WatchedEngine(Engine(), Watch(), None)) as watched:
        call = ask(watched)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_stream_that_hangs_ends_with_an_error_chunk() -> None:
    """Earlier chunks remain valid; the request is dropped from the engine."""
    engine = Engine()
    with closing(WatchedEngine(engine, SOON, None)) as watched:
        reply = await watched.answer("/v1/x", {"stream": True}, "r", 0)
        assert isinstance(reply, StreamedReply)
        chunks = [chunk async for chunk in reply.chunks]
        assert chunks[0] == {"number": 1}
        assert chunks[1]["error"]["message"] == "The engine has stopped."
        assert len(chunks) == 2
        await asyncio.wait_for(engine.is_left.wait(), WAIT_SECONDS)


async def test_a_slow_reader_of_a_complete_stream_is_not_a_hang() -> None:
    """Only the time spent waiting for the engine counts."""
    engine = Engine()
    engine.go.set()
    with closing(WatchedEngine(engine, SOON, None)) as watched:
        reply = await watched.answer("/v1/x", {"stream": True}, "r", 0)
        assert isinstance(reply, StreamedReply)
        chunks = []
        async for chunk in reply.chunks:
            chunks.append(chunk)
            await asyncio.sleep(0.5)
        assert chunks == [{"number": 1}, {"number": 2}]


async def test_a_stream_that_is_left_before_its_first_chunk_is_dropped() -> None:
    """The generator behind it is closed, too."""
    engine = Engine()
    with closing(WatchedEngine(engine, SOON, None)) as watched:
        reply = await watched.answer("/v1/x", {"stream": True}, "r", 0)
        assert isinstance(reply, StreamedReply)
        await reply.chunks.aclose()
        assert engine.is_left.is_set()


def test_a_load_that_hangs_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    """With status 4, the sentence and the stacks."""
    let_go = threading.Event()

    def load(*_: object, **__: object) -> Engine:
        let_go.wait()
        raise AssertionError

    watch = Watch(start_seconds=0.4, advice="Try again")
    with (
        pytest.raises(EngineLost, match=r"^m has not loaded after 0\.4 s\. Try again$") as caught,
        loaded_engine(load, EngineConfig("m"), ("m",), None, watch),
    ):
        raise AssertionError
    let_go.set()
    assert caught.value.exit_status == 4
    assert "in load" in caught.value.details
    assert "loading m" in capsys.readouterr().err


def test_a_download_may_take_longer_than_a_load() -> None:
    """Downloads have separate timeouts."""
    clock = LoadClock("m", Watch(start_seconds=1), None)
    poll = partial(clock.note_poll, 0.6)
    with downloading():
        for _ in range(10):
            poll()
    poll()
    with pytest.raises(EngineLost, match=r"m has not loaded after 1 s"):
        poll()
