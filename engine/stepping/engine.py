"""The engine that others hold: `await generate(requests)`; a thread of its own runs the model."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Requests
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.contract import EngineStats
from engine.errors import EngineClosed
from engine.protocol.errors import InternalError, RequestError
from engine.scheduling.sequence import Sequence, SequenceRequest, SequenceResult
from engine.stepping.core import Core

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Group:
    """The sequences of one `generate` call, answered together."""

    requests: Requests[SequenceRequest]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[SequenceResult]]
    sequences: list[Sequence] = field(default_factory=list)
    num_open: int = 0


class Engine:
    """Runs sequences for any number of asyncio callers until `close`."""

    def __init__(self, make_core: Callable[[], Core]) -> None:
        """Build the core in the engine's thread, wait for it, and raise what it raised."""
        self._inbox: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._group_of: dict[Sequence, _Group] = {}
        self._is_closed = False
        self._has_cancelled = False
        # Loading runs in the thread that runs steps: OpenMP keeps workers for each thread that ever
        # computed, and with more of them than cores they sleep between operations instead of spin.
        made: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_core, made), name="tidemill-engine", daemon=True
        )
        self._thread.start()
        made.result()

    async def generate(self, requests: Requests[SequenceRequest]) -> list[SequenceResult]:
        """Generate all `requests` and return their results in the same order.

        Raises `RequestError` when one of them cannot run here or failed, `EngineClosed` when the
        engine was closed before the end. Cancelling the call drops its sequences.
        """
        loop = asyncio.get_running_loop()
        group = _Group(requests, loop, loop.create_future())
        self._inbox.put(group)
        if self._is_closed:  # asked last: the thread may have emptied its inbox before
            group.future.cancel()
            raise EngineClosed("the engine is closed")
        try:
            return await group.future
        except asyncio.CancelledError:
            self._has_cancelled = True
            raise

    def stats(self) -> EngineStats:
        """Return a snapshot of the work; callable from any thread."""
        return self._core.stats()

    def close(self) -> None:
        """Stop after the step now running; unfinished calls raise `EngineClosed`. Idempotent."""
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self, make_core: Callable[[], Core], made: Future[None]) -> None:
        try:
            self._core = make_core()
        except BaseException as exc:  # noqa: BLE001 - raised again where the engine was asked for
            made.set_exception(exc)
            return
        made.set_result(None)
        self._work()

    def _work(self) -> None:
        reason = "the engine was closed"
        try:
            while not self._is_closed:
                self._receive(block=not self._group_of)
                self._drop_cancelled()
                finished = self._core.step() if self._group_of else None
                for sequence in finished or ():
                    self._close_sequence(sequence)
        except Exception as exc:  # whoever waits must hear of it: a silent thread is a hang
            logger.exception("the engine stopped")
            reason = f"the engine stopped: {type(exc).__name__}: {exc}"
        self._is_closed = True
        for group in set(self._group_of.values()):
            self._deliver(group, EngineClosed(reason))
        while not self._inbox.empty():
            waiting = self._inbox.get()
            if waiting is not None:
                self._deliver(waiting, EngineClosed(reason))

    def _receive(self, *, block: bool) -> None:
        """Take in what has arrived, waiting for the first when there is nothing to do."""
        try:
            group = self._inbox.get(block=block)
            while group is not None:
                self._admit(group)
                group = self._inbox.get(block=False)
        except queue.Empty:
            return

    def _admit(self, group: _Group) -> None:
        if group.future.cancelled():
            return
        try:
            for request in group.requests:
                group.sequences.append(self._core.add(request))
        except Exception as exc:  # noqa: BLE001 - whatever one request holds, the others go on
            self._core.abort(set(group.sequences))
            known = exc if isinstance(exc, RequestError) else InternalError(repr(exc))
            self._deliver(group, known)
            return
        if not group.sequences:
            self._deliver(group, [])
        group.num_open = len(group.sequences)
        self._group_of.update(dict.fromkeys(group.sequences, group))

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        dropped = {seq for seq, group in self._group_of.items() if group.future.cancelled()}
        self._core.abort(dropped)
        for sequence in dropped:
            del self._group_of[sequence]

    def _close_sequence(self, sequence: Sequence) -> None:
        group = self._group_of.pop(sequence)
        group.num_open -= 1
        if group.num_open:
            return
        try:
            self._deliver(group, [sequence.result() for sequence in group.sequences])
        except RequestError as exc:
            self._deliver(group, exc)

    def _deliver(self, group: _Group, outcome: list[SequenceResult] | Exception) -> None:
        def settle() -> None:
            if group.future.done():
                return
            if isinstance(outcome, Exception):
                group.future.set_exception(outcome)
            else:
                group.future.set_result(outcome)

        try:
            group.loop.call_soon_threadsafe(settle)
        except RuntimeError:
            return  # the caller's loop is gone, and the caller with it
