"""Data parallelism of a server: several engine processes behind one `Online`.

Requests with the same prefix go to one engine, as long as it has not much more work than others. An
engine that dies is restarted; its requests are rerun elsewhere, unless part of their stream has
been sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, Final
from zlib import crc32

from pydantic_core import from_json

from tidemill.batch.suspects import KILLED_MESSAGE
from tidemill.protocol.bodies import error_body
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats, Reply, StreamedReply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.in_thread import in_thread_if_long
from tidemill.protocol.requests import interactive_priority
from tidemill.protocol.stall import STALL_SECONDS

from .client import EngineClient
from .exchange import ExchangeRequest, decode_reply, encode_request
from .frames import Answer, AnswerKind, FrameError
from .loop_thread import LoopThread
from .replica_pool import Quarantined, ReplicaPool

_PREFIX_CHARS: Final = 512
_PROMPTS: Final = ("messages", "prompt", "input", "state", "query", "queries", "text_1")
_CLOSE_SECONDS: Final = 20.0

_Posted = Answer | Reply | Exception
_Answers = asyncio.Queue[_Posted]
_Post = Callable[[_Posted], None]


class ServedReplicas:
    """Engine processes of one model as one engine, for any event loop.

    A thread with its own loop starts them and communicates with them. `stats` raises EngineError
    once all engines have failed; `close` stops the processes.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        log: Callable[[str], None],
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._pool = ReplicaPool(commands, log=log, stall_seconds=stall_seconds)
        self._stopping = asyncio.Event()
        self._thread = LoopThread("tidemill-engines")
        started: Future[None] = Future()
        self._running = self._thread.submit(self._run(started))
        try:
            started.result()
        except BaseException:
            self._thread.end()
            raise

    def info(self) -> EngineInfo:
        """Return the combined info of all engines."""
        return self._pool.info()

    def stats(self) -> EngineStats:
        """Return the sums over all engines; raises EngineError once all have failed."""
        if self._pool.failure is not None:
            raise self._pool.failure
        return self._pool.stats()

    def close(self) -> None:
        """Stop all processes."""
        self._thread.loop.call_soon_threadsafe(self._stopping.set)
        with suppress(TimeoutError):
            self._running.result(_CLOSE_SECONDS)
        self._thread.end()

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer a line of a file."""
        reply = await self._ask(ExchangeRequest(url, body, request_id), created, is_online=False)
        assert isinstance(reply, Reply)
        return reply

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer an interactive request, streamed if its body requests that."""
        return await self._ask(ExchangeRequest(url, body, request_id), created, is_online=True)

    async def _ask(
        self, request: ExchangeRequest, created: int, *, is_online: bool
    ) -> Reply | StreamedReply:
        loop, answers = asyncio.get_running_loop(), _Answers()
        data, home = await asyncio.to_thread(_encode, request)  # it may contain many values

        def post(answer: _Posted) -> None:
            with suppress(RuntimeError):  # the server's loop is closed, so nothing waits
                loop.call_soon_threadsafe(answers.put_nowait, answer)

        is_urgent = is_online and interactive_priority(request.body) is not None
        exchange = self._exchange(
            data, created, home, post, is_online=is_online, is_urgent=is_urgent
        )
        asking = self._thread.submit(exchange)
        try:
            first = await _next(answers)
            if isinstance(first, Reply):
                return first
            if first.kind is AnswerKind.REPLY:
                return await in_thread_if_long(decode_reply, first.data)
            chunks = _chunks(first, answers, asking)
            await anext(chunks)
        except BaseException:
            asking.cancel()
            raise
        return StreamedReply(chunks)

    async def _exchange(
        self,
        data: bytes,
        created: int,
        home: int,
        post: _Post,
        *,
        is_online: bool,
        is_urgent: bool,
    ) -> None:
        """Post the frames of an answer, from another engine if one dies before the first."""
        has_begun = False

        async def exchange(client: EngineClient) -> None:
            nonlocal has_begun
            async with aclosing(client.ask(data, created, is_online=is_online)) as answers:
                async for answer in answers:
                    has_begun = True
                    post(answer)

        try:
            await self._pool.run(
                exchange, home=home, is_urgent=is_urgent, may_repeat=lambda: not has_begun
            )
        except Quarantined:
            post(_failed(KILLED_MESSAGE, code="engine_died", status_code=500))
        except FrameError as exc:
            post(_failed(f"The request is too long: {exc}.", code="too_long", status_code=413))
        except Exception as exc:  # noqa: BLE001 - raised where the answer is awaited
            post(exc)

    async def _run(self, started: Future[None]) -> None:
        """Start the processes, and stop them once `close` is called."""
        try:
            async with self._pool.started():
                started.set_result(None)
                await self._stopping.wait()
        except BaseException as exc:
            if started.done():
                raise
            started.set_exception(exc)


async def _next(answers: _Answers) -> Answer | Reply:
    """Return the next frame; raises an exception that was posted instead."""
    answer = await answers.get()
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, Answer) and answer.kind is AnswerKind.FAULT:
        raise RuntimeError(answer.data.decode())
    return answer


async def _chunks(
    first: Answer, answers: _Answers, asking: Future[None]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield an empty chunk, then those of a stream; it ends with an error if its engine dies.

    Once the first chunk has been consumed, closing the generator always cancels the request.
    """
    answer: Answer | Reply = first
    try:
        yield {}
        while isinstance(answer, Answer) and answer.kind is AnswerKind.CHUNK:
            yield await in_thread_if_long(from_json, answer.data)
            try:
                answer = await _next(answers)
            except EngineError as exc:
                yield _failed("The engine has stopped.", code=exc.code, status_code=503).body
                return
    finally:
        asking.cancel()


def _failed(message: str, *, code: str, status_code: int) -> Reply:
    error = RequestError(message, code=code, status_code=status_code, type="server_error")
    return Reply(status_code, error_body(error))


def _encode(request: ExchangeRequest) -> tuple[bytes, int]:
    """Return the bytes of a request, and the number of its prefix."""
    return encode_request(request), prefix_number(request.body)


def prefix_number(body: dict[str, Any]) -> int:
    """Return a number for a request's prefix, the same for prompts that start alike."""
    prompt = next((body[name] for name in _PROMPTS if name in body), "")
    start, room = [], _PREFIX_CHARS
    for text in _texts(prompt):
        start.append(text[:room])
        room -= len(start[-1])
        if room <= 0:
            break
    return crc32("\0".join(start).encode("utf-8", "replace"))


def _texts(prompt: Any) -> Iterator[str]:
    """Yield the texts of a prompt in order; token IDs as digits."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, dict):
        for value in prompt.values():
            yield from _texts(value)
    elif isinstance(prompt, list):
        for value in prompt:
            yield from _texts(value)
    elif prompt is not None:
        yield json.dumps(prompt)
