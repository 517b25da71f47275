"""The engine that others hold: requests in, events or results out; a thread of its own works."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from tidemill.protocol.contract import EngineError, EngineStats
from tidemill.protocol.errors import InternalError, RequestError

from ..errors import EngineClosed
from .core import EngineCore, RunningRequest, StepOutput

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

# An event and the place of its request in the call, or what ends the call.
_News: TypeAlias = tuple[int, StepOutput[ResultT]] | Exception


@dataclass(slots=True, eq=False)
class _Call(Generic[RequestT, ResultT]):
    """One call of `stream`: what it asks for, and what has arrived for it in its loop."""

    requests: Sequence[RequestT]
    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[_News[ResultT]] = field(default_factory=asyncio.Queue)
    place_of: dict[RunningRequest[ResultT], int] = field(default_factory=dict)
    is_left: bool = False  # nobody waits for it any more


_Letter: TypeAlias = tuple[_Call[RequestT, ResultT], _News[ResultT]]


class Engine(Generic[RequestT, ResultT]):
    """Runs work of one kind for any number of asyncio callers until `close`."""

    def __init__(
        self,
        make_core: Callable[[], EngineCore[RequestT, ResultT]],
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the work in the engine's thread, wait for it, and raise what it raised.

        The thread does `at_end` last, whatever it ends by.
        """
        self._inbox: queue.SimpleQueue[_Call[RequestT, ResultT] | None] = queue.SimpleQueue()
        self._call_of: dict[RunningRequest[ResultT], _Call[RequestT, ResultT]] = {}
        self._is_closed = False
        self._failure: str | None = None  # why the thread has ended, unless it was closed
        self._has_left = False  # some caller has, since the thread last looked
        # Loading runs in the thread that runs steps: OpenMP keeps workers for each thread that ever
        # computed, and with more of them than cores they sleep between operations instead of spin.
        made: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_core, made, at_end), name="tidemill-engine", daemon=True
        )
        self._thread.start()
        made.result()

    async def stream(
        self, requests: Sequence[RequestT]
    ) -> AsyncGenerator[tuple[int, StepOutput[ResultT]], None]:
        """Run all `requests`; yield events as they come, each with the place of its request.

        Raises `RequestError` when one of them cannot run here, `EngineClosed` when the engine was
        closed before the end. An iterator that is closed or cancelled drops what it asked for
        within a step.
        """
        num_open = len(requests)
        call = _Call[RequestT, ResultT](requests, asyncio.get_running_loop())
        self._inbox.put(call)
        try:
            if self._is_closed:  # asked last: the thread may have emptied its inbox before
                raise EngineClosed(self._failure or "the engine is closed")
            while num_open:
                news = await call.arrived.get()
                if isinstance(news, Exception):
                    raise news
                num_open -= news[1].is_finished
                yield news
        finally:
            if num_open:
                call.is_left = True
                self._has_left = True

    async def generate(self, requests: Sequence[RequestT]) -> list[ResultT]:
        """Run all `requests` and return their results in the same order.

        Raises as `stream` does, and the `RequestError` of the first that failed, once all are
        through.
        """
        finished: dict[int, RunningRequest[ResultT]] = {}
        async with aclosing(self.stream(requests)) as outputs:
            async for place, output in outputs:
                if output.is_finished:
                    finished[place] = output.request
        return [finished[place].result() for place in range(len(requests))]

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread.

        Raises `EngineError` once nothing can be done any more, though nobody may have closed it.
        """
        if self._failure is not None:
            raise EngineClosed(self._failure)
        return self._core.stats()

    def close(self) -> None:
        """Stop after the step now running; unfinished calls raise `EngineClosed`. Idempotent."""
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join()

    def _run(
        self,
        make_core: Callable[[], EngineCore[RequestT, ResultT]],
        made: Future[None],
        at_end: Callable[[], None],
    ) -> None:
        try:
            self._core = make_core()
        except BaseException as exc:  # noqa: BLE001 - raised again where the engine was asked for
            self._end(at_end)
            made.set_exception(exc)
            return
        made.set_result(None)
        reason = "the engine was closed"
        try:
            self._step_until_closed()
        except EngineError as exc:
            reason = self._failure = f"the engine stopped: {exc}"
            logger.error(reason)  # noqa: TRY400 - which says all that there is
        except BaseException as exc:  # whoever waits must hear of it: a silent thread is a hang
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
        """Do what is to be done at the end; whoever waits hears of that, whatever fails in it."""
        try:
            at_end()
        except Exception:
            logger.exception("the engine did not end as it should")

    def _step_until_closed(self) -> None:
        is_idle = True
        while not self._is_closed:
            self._receive(block=is_idle)
            self._drop_left()
            outputs = self._core.step()
            is_idle = outputs is None
            self._send([self._address(output) for output in outputs or ()])

    def _receive(self, *, block: bool) -> None:
        """Take in what has arrived, waiting for the first when there is nothing to do."""
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
        except Exception as exc:  # noqa: BLE001 - whatever one request holds, the others go on
            self._core.abort(call.place_of.keys())
            known = exc if isinstance(exc, RequestError) else InternalError(repr(exc))
            self._send([(call, known)])
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
        """Hand news to the calls that they are for, waking each loop once."""
        letters_of: dict[asyncio.AbstractEventLoop, list[_Letter[RequestT, ResultT]]] = {}
        for call, news in mail:
            letters_of.setdefault(call.loop, []).append((call, news))
        for loop, letters in letters_of.items():
            try:
                loop.call_soon_threadsafe(_hand_out, letters)
            except RuntimeError:  # the loop is gone, and the callers with it
                for call, _ in letters:
                    call.is_left = True
                self._has_left = True


def _hand_out(letters: list[_Letter[RequestT, ResultT]]) -> None:
    for call, news in letters:
        call.arrived.put_nowait(news)
