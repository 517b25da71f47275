"""Every batch that is kept here, carried to its end: checked, answered, published.

What is done is in the store before the next thing begins, so a runner that begins anew goes on
where any other has stopped.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Final

from engine.backpressure import InFlight
from engine.batchfile.lines import FormError
from engine.contract import Served
from engine.errors import EngineError
from engine.protocol.names import ANY_MODEL
from handler.batch.model import Batch, BatchError
from handler.batch.states import Status
from handler.batch.wire import BatchObject, to_wire
from handler.errors import InvalidMove
from server.local.answering import Answering
from server.local.batches import Kept
from server.local.checking import check_file
from server.local.folder import is_full
from server.local.publishing import fill, publish
from server.local.rows import RowsGone
from server.local.store import Store

_logger = logging.getLogger(__name__)

MAX_HELD_BYTES: Final = 64 * 2**20
MAX_RUNNING: Final = 16
"""So many batches take turns; others wait for them."""

_LINES_PER_SEQUENCE = 4
_RETRY_SECONDS = 5.0
_EXPIRED_SECONDS = 600.0
_INPUT_CODES = ("input_gone", "input_changed")


class _Interrupted(Exception):
    """A file is not looked at to its end, since nobody waits for that any more."""


@dataclass(eq=False, slots=True)
class _Carried:
    """A batch on its way: `stop` is set once it must not go on as it does."""

    id: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    has_stopped: Event = field(default_factory=Event)  # the same, for a thread
    trouble: BatchError | None = None
    answering: Answering | None = None


class Runner:
    """Carries the batches of a store by one engine. Made for one loop, in which all is called.

    `models` are what lines may ask for, by each name. `retry_seconds` pass before what failed for
    want of room is tried again.
    """

    def __init__(
        self,
        store: Store,
        engine: Served,
        models: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.time,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        self._store = store
        self._engine = engine
        self._models = models
        self._clock = clock
        self._retry_seconds = retry_seconds
        max_lines = _LINES_PER_SEQUENCE * engine.info().max_num_seqs
        self._window = InFlight(MAX_HELD_BYTES, max_lines)
        self._checking = asyncio.Semaphore(1)
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._carried: dict[str, _Carried] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Carry batches while entered; those that have not ended are left as they are.

        What is answered by then is durable.
        """
        await asyncio.to_thread(self._store.clear_up)
        for batch_id in await asyncio.to_thread(self._store.batches.open_ids):
            self.take(batch_id)
        self._begin(self._drop_expired())
        try:
            yield
        finally:
            for carried in self._carried.values():
                carried.has_stopped.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self, batch_id: str) -> None:
        """Begin to carry a batch that is in the store; one that is carried already goes on."""
        if batch_id not in self._carried:
            carried = self._carried[batch_id] = _Carried(batch_id)
            self._begin(self._carry(carried))

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch, whose finished rows are kept; raises InvalidMove for one that has ended.

        Repeated it changes nothing.
        """
        moved = await asyncio.to_thread(self._move_to_cancelled, batch_id)
        if (carried := self._carried.get(batch_id)) is not None:
            carried.stop.set()
            carried.has_stopped.set()
        return moved

    def complete_through(self, batch_id: str) -> int:
        """Return a line up to which every line of a batch that runs has a durable row, or none."""
        carried = self._carried.get(batch_id)
        if carried is None or carried.answering is None:
            return 0
        return carried.answering.complete_through

    def describe(self, kept: Kept) -> BatchObject:
        """Return a batch as clients see it, with what holds it up."""
        batch, progress = kept.batch, kept.progress
        carried = self._carried.get(batch.id)
        if carried is not None and carried.trouble is not None:
            batch = replace(batch, errors=(*batch.errors, carried.trouble))
        if carried is not None and carried.answering is not None:
            progress = replace(progress, **carried.answering.pace.rates._asdict())
        return to_wire(batch, progress, now=self._clock(), has_worker=carried is not None)

    def _move_to_cancelled(self, batch_id: str) -> Batch:
        table = self._store.batches
        kept = table.get(batch_id)
        assert kept is not None, batch_id
        if kept.batch.status in (Status.CANCELLING, Status.CANCELLED):
            return kept.batch
        moved = table.move(batch_id, Status.CANCELLING, self._clock())
        if kept.batch.in_progress_at is None:  # nothing of it was ever run
            moved = publish(self._store, moved, Status.CANCELLED, self._clock())
        return moved

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop_expired(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRED_SECONDS)
            with suppress(OSError, sqlite3.Error):
                await asyncio.to_thread(self._store.drop_expired)

    async def _carry(self, carried: _Carried) -> None:
        """Bring a batch from one status to the next until it has ended."""
        try:
            while True:
                kept = await asyncio.to_thread(self._store.batches.get, carried.id)
                assert kept is not None, carried.id
                if kept.batch.is_terminal:
                    break
                with suppress(InvalidMove):  # it was cancelled meanwhile
                    await self._go_on(carried, kept.batch)
        except EngineError as exc:
            _logger.exception("%s stands still", carried.id)
            message = "The engine cannot go on: the batch does once the server is started again."
            carried.trouble = BatchError(exc.code, message)
            return
        del self._carried[carried.id]

    async def _go_on(self, carried: _Carried, batch: Batch) -> None:
        """Do what comes next, again after a while when there is no room for it."""
        try:
            await self._next_step(carried, batch)
            carried.trouble = None
        except (OSError, sqlite3.Error) as exc:
            if isinstance(exc, FileNotFoundError) and not self._store.input_of(batch.id).exists():
                words = "The input is no longer in the server's folder: somebody has removed it."
                await self._give_up(batch, BatchError(_INPUT_CODES[0], words))
                return
            carried.trouble = _trouble_of(exc)
            _logger.warning("%s waits: %s", batch.id, exc)
            await asyncio.sleep(self._retry_seconds)
        except FormError as exc:
            await self._give_up(batch, BatchError(_INPUT_CODES[1], exc.message))
        except RowsGone as exc:
            await self._give_up(batch, BatchError("rows_gone", str(exc)))
        except (EngineError, InvalidMove):
            raise
        except Exception:
            _logger.exception("%s failed", batch.id)
            words = "Something went wrong on the server's side; its log tells what."
            await self._give_up(batch, BatchError("internal_error", words))

    async def _next_step(self, carried: _Carried, batch: Batch) -> None:
        match batch.status:
            case Status.VALIDATING:
                await self._check(carried, batch)
            case Status.IN_PROGRESS if not self._is_served(batch):
                await self._wait_for_another_server(carried, batch)
            case Status.IN_PROGRESS:
                await self._answer(carried, batch)
            case Status.FINALIZING if batch.outcome is Status.EXPIRED:
                await asyncio.to_thread(fill, self._store, batch)
                await self._publish(batch, Status.EXPIRED)
            case Status.CANCELLING:
                await self._publish(batch, Status.CANCELLED)
            case _:
                await self._publish(batch, batch.outcome or Status.COMPLETED)

    async def _publish(self, batch: Batch, status: Status, **changes: Any) -> None:
        await asyncio.to_thread(
            lambda: publish(self._store, batch, status, self._clock(), **changes)
        )

    async def _give_up(self, batch: Batch, error: BatchError) -> None:
        """Let a batch fail; finished rows are kept, unless it is these that are the matter."""
        _logger.error("%s fails: %s", batch.id, error.message)
        errors = batch.errors if error in batch.errors else (*batch.errors, error)
        changes = {"errors": errors, "num_errors": len(errors)}
        if batch.status is Status.IN_PROGRESS:
            await self._move(batch, Status.FINALIZING, outcome=Status.FAILED, **changes)
            return
        cancelling = batch.status is Status.CANCELLING
        status = Status.CANCELLED if cancelling else Status.FAILED
        if error.code in _INPUT_CODES:
            await self._publish(batch, status, **changes)
        else:
            await asyncio.to_thread(self._end, batch, status, changes)

    def _end(self, batch: Batch, status: Status, changes: dict[str, Any]) -> None:
        kept = self._store.batches.get(batch.id)
        assert kept is not None, batch.id
        final = kept.progress.at_rest
        self._store.batches.move(batch.id, status, self._clock(), final=final, **changes)
        self._store.rows_of(batch.id).forget()
        self._store.drop_work(batch.id)

    async def _move(self, batch: Batch, status: Status, **changes: Any) -> Batch:
        return await asyncio.to_thread(
            lambda: self._store.batches.move(batch.id, status, self._clock(), **changes)
        )

    async def _check(self, carried: _Carried, batch: Batch) -> None:
        def look() -> None:
            if carried.has_stopped.is_set():
                raise _Interrupted

        async with self._checking:
            try:
                verdict, findings = await asyncio.to_thread(
                    check_file,
                    self._store.input_of(batch.id),
                    self._models,
                    batch.options.on_invalid_line,
                    look,
                )
            except _Interrupted:
                return
        if verdict.num_errors:
            errors = {"errors": verdict.errors, "num_errors": verdict.num_errors}
            await asyncio.to_thread(self._end, batch, Status.FAILED, errors)
            return
        await self._move(
            batch, Status.IN_PROGRESS, model=findings.model, num_rows=findings.num_rows
        )

    def _is_served(self, batch: Batch) -> bool:
        return batch.model in self._models.values() or ANY_MODEL in self._models

    async def _wait_for_another_server(self, carried: _Carried, batch: Batch) -> None:
        """Leave a batch alone whose lines ask for a model that an earlier server had."""
        served = ", ".join(sorted(set(self._models.values())))
        words = f"The batch is for {batch.model}, and {served} is served: start a server of that."
        carried.trouble = BatchError("model_not_served", words)
        seconds = max(0.0, batch.expires_at - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await carried.stop.wait()
            return
        await self._move(batch, Status.FINALIZING, outcome=Status.EXPIRED)

    async def _answer(self, carried: _Carried, batch: Batch) -> None:
        """Answer the lines of a batch until all are, or it is cancelled or late."""
        rows = self._store.rows_of(batch.id)
        await asyncio.to_thread(rows.open)
        path = self._store.input_of(batch.id)
        answering = Answering(path, rows, self._engine, self._window, batch.created_at)
        carried.answering = answering
        stopping = asyncio.create_task(carried.stop.wait())
        working = asyncio.create_task(self._in_turn(answering))
        flushing = asyncio.create_task(self._flush_often(carried, answering))
        seconds = max(0.0, batch.expires_at - self._clock())
        try:
            await asyncio.wait(
                {stopping, working}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            await _ended(stopping, working)
            await self._flush_all(carried, answering)
        finally:
            await _ended(stopping, working, flushing)
            await self._flush(carried, answering)
            answering.forget()
            carried.answering = None
        if not working.cancelled():
            working.result()
            await self._move(batch, Status.FINALIZING, outcome=Status.COMPLETED)
        elif not carried.stop.is_set():
            await self._move(batch, Status.FINALIZING, outcome=Status.EXPIRED)

    async def _in_turn(self, answering: Answering) -> None:
        async with self._running:
            await answering.run()

    async def _flush_often(self, carried: _Carried, answering: Answering) -> None:
        while True:
            await answering.due()
            await self._flush_all(carried, answering)

    async def _flush_all(self, carried: _Carried, answering: Answering) -> None:
        is_durable = False
        while not is_durable:
            is_durable = await self._flush(carried, answering)
            await asyncio.sleep(0 if is_durable else self._retry_seconds)

    async def _flush(self, carried: _Carried, answering: Answering) -> bool:
        """Make durable what is answered; False where there is no room, and it is still held."""
        try:
            await answering.flush()
        except (OSError, sqlite3.Error) as exc:
            if carried.trouble is None:
                _logger.warning("%s waits: %s", carried.id, exc)
            carried.trouble = _trouble_of(exc)
            return False
        carried.trouble = None
        return True


def _trouble_of(exc: Exception) -> BatchError:
    """Return what holds a batch up, in words for whoever asks about it."""
    if is_full(exc):
        words = "The disk of the server is full: the batch goes on as soon as there is room."
        return BatchError("disk_full", words)
    reason = exc.strerror if isinstance(exc, OSError) else str(exc)
    return BatchError("disk_error", f"The server's folder cannot be used: {reason}.")


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    """Return when tasks have ended, cancelled where they had not."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
