"""The engine as callers see it: requests in, events or results out, with its own thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from tidemill.protocol.contract import EngineError, EngineStats
from tidemill.protocol.errors import InternalError, RequestError

from ..errors import EngineClosed
from .core import EngineCore, RunningRequest, StepOutput

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

# An event and the place of its request in the call, or the exception that ends the call.
_News: TypeAlias = tuple[int, StepOutput[ResultT]] | Exception


@dataclass(slots=True, eq=False)
class _Call(Generic[RequestT, ResultT]):
    """One call: its requests, and the function of its loop that takes their news."""

    requests: Sequence[RequestT]
    loop: asyncio.AbstractEventLoop
    take: Callable[[_News[ResultT]], None]
    place_of: dict[RunningRequest[ResultT], int] = field(default_factory=dict)
    is_left: bool = False  # its caller no longer waits


_Letter: TypeAlias = tuple[_Call[RequestT, ResultT], _News[ResultT]]


class Engine(Generic[RequestT, ResultT]):
    """Runs one kind of work for any number of asyncio callers until `close`."""

    def __init__(
        self,
        make_core: Callable[[], EngineCore[RequestT, ResultT]],
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the core in the engine's thread, wait for it, and raise its exception, if any.

        The thread always calls `at_end` last.
        """
        self._inbox: queue.SimpleQueue[_Call[RequestT, ResultT] | None] = queue.SimpleQueue()
        self._call_of: dict[RunningRequest[ResultT], _Call[RequestT, ResultT]] = {}
        self._is_closed = False
        self._failure: str | None = None  # why the thread has ended, unless it was closed
        self._has_left = False  # a caller has left since the thread last checked
        self._step_seconds = 0.0
        # Loading runs in the thread that runs steps: OpenMP keeps workers for each thread that ever
        # computed; with more workers than cores they sleep between operations instead of spinning.
        created: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_core, created, at_end), name="tidemill-engine", daemon=True
        )
        self._thread.start()
        created.result()

    async def stream(
        self, requests: Sequence[RequestT]
    ) -> AsyncGenerator[tuple[int, StepOutput[ResultT]], None]:
        """Run all `requests`; yield events as they come, each with the place of its request.

        Raises `RequestError` if one of them cannot run here, and `EngineClosed` if the engine was
        closed before the end. An iterator that is closed or cancelled drops its requests within a
        step.
        """
        num_open = len(requests)
        arrived = asyncio.Queue[_News[ResultT]]()
        call = _Call[RequestT, ResultT](requests, asyncio.get_running_loop(), arrived.put_nowait)
        try:
            self._submit(call)
            while num_open:
                news = await arrived.get()
                if isinstance(news, Exception):
                    raise news
                num_open -= news[1].is_finished
                yield news
        finally:
            if num_open:
                self._leave(call)

    async def generate(self, requests: Sequence[RequestT]) -> list[ResultT]:
        """Run all `requests` and return their results in the same order.

        Raises the same errors as `stream`, and the `RequestError` of the first failed request once
        all have ended.
        """
        loop, num_requests = asyncio.get_running_loop(), len(requests)
        finished: dict[int, RunningRequest[ResultT]] = {}
        ended: asyncio.Future[Exception | None] = loop.create_future()

        def take(news: _News[ResultT]) -> None:
            if ended.done():
                return
            if isinstance(news, Exception):
                ended.set_result(news)
            elif news[1].is_finished:
                finished[news[0]] = news[1].request
                if len(finished) == num_requests:
                    ended.set_result(None)

        call = _Call[RequestT, ResultT](requests, loop, take)
        try:
            self._submit(call)
            if num_requests and (failure := await ended) is not None:
                raise failure
        finally:
            if len(finished) < num_requests:
                self._leave(call)
        return [finished[place].result() for place in range(num_requests)]

    def _submit(self, call: _Call[RequestT, ResultT]) -> None:
        self._inbox.put(call)
        if self._is_closed:  # checked last: the thread may have emptied its inbox before
            raise EngineClosed(self._failure or "the engine is closed")

    def _leave(self, call: _Call[RequestT, ResultT]) -> None:
        call.is_left = True
        self._has_left = True

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread.

        Raises `EngineError` once the engine has stopped, even if no caller has closed it.
        """
        if self._failure is not None:
            raise EngineClosed(self._failure)
        return replace(self._core.stats(), step_seconds=self._step_seconds)

    def close(self) -> None:
        """Stop after the step now running; unfinished calls raise `EngineClosed`. Idempotent."""
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join()

    def _run(
        self,
        make_core: Callable[[], EngineCore[RequestT, ResultT]],
        created: Future[None],
        at_end: Callable[[], None],
    ) -> None:
        try:
            self._core = make_core()
        except BaseException as exc:  # noqa: BLE001 - raised again in the constructor
            self._end(at_end)
            created.set_exception(exc)
            return
        created.set_result(None)
        reason = "the engine was closed"
        try:
            self._step_until_closed()
        except EngineError as exc:
            reason = self._failure = f"the engine stopped: {exc}"
            logger.error(reason)  # noqa: TRY400 - the message is complete
        except BaseException as exc:  # callers must be notified: a silent thread is a hang
            reason = self._failure = f"the engine stopped: {type(exc).__name__}: {exc}"
            logger.exception("the engine stopped")
        self._is_closed = True
        self._end(at_end)
        calls = set(self._call_of.values())
        while not self._inbox.empty():
            call = self._inbox.get()
            if call is not None:
                calls.add(call)
        self._send((call, EngineClosed(reason)) for call in calls)

    def _end(self, at_end: Callable[[], None]) -> None:
        """Call `at_end`; its failure must not keep callers from being notified."""
        try:
            at_end()
        except Exception:
            logger.exception("the engine's cleanup failed")

    def _step_until_closed(self) -> None:
        is_idle, began = True, 0.0
        while not self._is_closed:
            self._receive(block=is_idle)
            began = time.perf_counter() if is_idle else began
            self._drop_left()
            outputs = self._core.step()
            is_idle = outputs is None
            self._send([self._address(output) for output in outputs or ()])
            ended = time.perf_counter()
            self._step_seconds, began = self._step_seconds + ended - began, ended

    def _receive(self, *, block: bool) -> None:
        """Admit the calls that have arrived; with `block`, wait for the first."""
        try:
            call = self._inbox.get(block=block)
            while call is not None:
                self._admit(call)
                call = self._inbox.get(block=False)
        except queue.Empty:
            return

    def _admit(self, call: _Call[RequestT, ResultT]) -> None:
        if call.is_left:
            return
        try:
            for place, request in enumerate(call.requests):
                call.place_of[self._core.add(request)] = place
        except Exception as exc:  # noqa: BLE001 - one bad request must not stop the others
            self._core.abort(call.place_of.keys())
            reported = exc if isinstance(exc, RequestError) else InternalError(repr(exc))
            self._send([(call, reported)])
            return
        self._call_of.update(dict.fromkeys(call.place_of, call))

    def _drop_left(self) -> None:
        if not self._has_left:
            return
        self._has_left = False
        left = {item for item, call in self._call_of.items() if call.is_left}
        self._core.abort(left)
        for item in left:
            del self._call_of[item]

    def _address(self, output: StepOutput[ResultT]) -> _Letter[RequestT, ResultT]:
        call = self._call_of[output.request]
        if output.is_finished:
            del self._call_of[output.request]
        return call, (call.place_of[output.request], output)

    def _send(self, mail: Iterable[_Letter[RequestT, ResultT]]) -> None:
        """Deliver news to their calls, waking each loop once."""
        letters_of: dict[asyncio.AbstractEventLoop, list[_Letter[RequestT, ResultT]]] = {}
        for call, news in mail:
            letters_of.setdefault(call.loop, []).append((call, news))
        for loop, letters in letters_of.items():
            try:
                loop.call_soon_threadsafe(_hand_out, letters)
            except RuntimeError:  # the loop is gone, and the callers with it
                for call, _ in letters:
                    self._leave(call)


def _hand_out(letters: list[_Letter[RequestT, ResultT]]) -> None:
    for call, news in letters:
        call.take(news)
