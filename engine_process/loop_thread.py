"""Loop thread: an event loop in a thread, which runs coroutines for callers in any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

_END_SECONDS: Final = 20.0

_Result = TypeVar("_Result")


class LoopThread:
    """A daemon thread with the event loop `loop`, until `end`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether it runs coroutines."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in it."""
        return threading.current_thread() is self._thread

    def submit(self, running: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run a coroutine; return the future of its result, whose cancellation cancels it.

        The future is cancelled if the thread has ended. `asyncio.run_coroutine_threadsafe` would
        log the error of a task whose future is cancelled.
        """
        future = Future[_Result]()
        with self._lock:  # after `end` nothing would cancel the task
            if self._has_ended:
                running.close()
                future.cancel()
            else:
                self.loop.call_soon_threadsafe(self._begin, running, future)
        return future

    def end(self) -> None:
        """Cancel all coroutines, and end the thread."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(_cancel_rest())
            self.loop.close()

    def _begin(self, running: Coroutine[Any, Any, _Result], future: Future[_Result]) -> None:
        task = self.loop.create_task(running)
        task.add_done_callback(partial(_set_outcome, future))
        future.add_done_callback(partial(self._cancel, task))

    def _cancel(self, task: asyncio.Task[Any], future: Future[Any]) -> None:
        if future.cancelled():
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(task.cancel)


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _set_outcome(future: Future[_Result], task: asyncio.Task[_Result]) -> None:
    """Set the outcome of a task, unless its future is cancelled."""
    if task.cancelled():
        future.cancel()
        return
    error = task.exception()
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
