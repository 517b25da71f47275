"""Batch runner: takes every stored batch through validation, its run, and publishing.

Each step is durable before the next one starts, so a restarted runner resumes where the last one
stopped.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Final

from tidemill.batch.batch_object import BatchObject, batch_object
from tidemill.batch.errors import InvalidMove
from tidemill.batch.file.lines import FormatError
from tidemill.batch.model import Batch, BatchError, EngineInfo
from tidemill.batch.states import Status
from tidemill.protocol.contract import EngineError, Responder, Served
from tidemill.protocol.in_flight import InFlightLimiter
from tidemill.protocol.names import ANY_MODEL

from .batch_run import BatchRun, LineTurns
from .batches import StoredBatch
from .folder import is_full
from .publish import fill_expired, publish
from .rows import RowsGone
from .store import Store
from .validation import check_file

_logger = logging.getLogger(__name__)

MAX_HELD_BYTES: Final = 64 * 2**20
MAX_RUNNING: Final = 16
"""Batches of one priority that share the engine at once; others wait for a slot."""

_LINES_PER_SEQUENCE = 4
_RETRY_SECONDS = 5.0
_EXPIRED_SECONDS = 600.0
_INPUT_CODES = ("input_gone", "input_changed")


class _Interrupted(Exception):
    """The validation of a file was cancelled."""


@dataclass(eq=False, slots=True)
class _RunningBatch:
    """A batch in progress; set `stop` to end its current step."""

    id: str
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    thread_stop: Event = field(default_factory=Event)  # the same, for a thread
    problem: BatchError | None = None
    run: BatchRun | None = None


async def _after(delay: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await asyncio.sleep(delay)
    await work()


class Runner:
    """Runs the batches of a store on one engine; all calls come from one event loop.

    `models` maps each name that lines may use to its model; a `responder` answers lines in place of
    the engine. A step that failed for lack of disk space is retried after `retry_seconds`.
    """

    def __init__(
        self,
        store: Store,
        engine: Served,
        models: Mapping[str, str],
        *,
        responder: Responder | None = None,
        clock: Callable[[], float] = time.time,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        self._store = store
        self._engine = engine
        self._responder = responder or engine
        self._models = models
        self._clock = clock
        self._retry_seconds = retry_seconds
        max_lines = _LINES_PER_SEQUENCE * engine.info().max_num_seqs
        self._in_flight = InFlightLimiter(MAX_HELD_BYTES, max_lines)
        self._check_slot = asyncio.Semaphore(1)
        self._turns = LineTurns()
        # By priority, so that no batch waits for batches that it comes before.
        self._run_slots = defaultdict[int, asyncio.Semaphore](
            lambda: asyncio.Semaphore(MAX_RUNNING)
        )
        self._batches: dict[str, _RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run batches while entered; unfinished ones resume at the next start.

        Rows that finish before the exit are durable.
        """
        await asyncio.to_thread(self._store.clean_up)
        for batch_id in await asyncio.to_thread(self._store.batches.open_ids):
            self.start(batch_id)
        self._spawn(self._delete_expired)
        try:
            yield
        finally:
            for running in self._batches.values():
                running.thread_stop.set()
            # A failing task starts another one, so this is a loop.
            while tasks := [task for task in self._tasks if not task.done()]:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, batch_id: str) -> None:
        """Start a stored batch, unless it is already running."""
        if batch_id not in self._batches:
            running = _RunningBatch(batch_id)
            self._spawn(lambda: self._run_to_end(running))
            self._batches[batch_id] = running

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch and keep its finished rows; raises InvalidMove for one that has ended.

        Idempotent.
        """
        moved = await asyncio.to_thread(self._move_to_cancelled, batch_id)
        if (running := self._batches.get(batch_id)) is not None:
            running.stop.set()
            running.thread_stop.set()
        return moved

    def complete_through(self, batch_id: str) -> int:
        """Return the last line up to which a running batch has all rows durable; 0 if unknown."""
        running = self._batches.get(batch_id)
        if running is None or running.run is None:
            return 0
        return running.run.complete_through

    def describe(self, stored: StoredBatch) -> BatchObject:
        """Return the Batch object that clients see, with the current problem among its errors."""
        batch, progress = stored.batch, stored.progress
        running = self._batches.get(batch.id)
        if running is not None and running.problem is not None:
            batch = replace(batch, errors=(*batch.errors, running.problem))
        if running is not None and running.run is not None:
            progress = replace(progress, **running.run.pace.rates._asdict())
        return batch_object(batch, progress, now=self._clock(), has_worker=running is not None)

    def _move_to_cancelled(self, batch_id: str) -> Batch:
        table = self._store.batches
        stored = table.get(batch_id)
        if stored is None:
            raise InvalidMove(f"Batch {batch_id} has been deleted.")
        if stored.batch.status in (Status.CANCELLING, Status.CANCELLED):
            return stored.batch
        moved = table.move(batch_id, Status.CANCELLING, self._clock())
        if stored.batch.in_progress_at is None:  # nothing of it has run
            moved = publish(self._store, moved, Status.CANCELLED, self._clock())
        return moved

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], delay: float = 0.0) -> None:
        """Run work in a task after a delay in seconds; it runs again when it raises."""
        task = asyncio.get_running_loop().create_task(_after(delay, work))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_end(task, work))

    def _on_end(
        self, task: asyncio.Task[None], work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            _logger.error("A batch task failed and will be retried.", exc_info=exc)
            self._spawn(work, self._retry_seconds)

    async def _delete_expired(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRED_SECONDS)
            await asyncio.to_thread(self._store.delete_expired)

    async def _run_to_end(self, running: _RunningBatch) -> None:
        """Advance a batch from status to status until it is terminal."""
        is_terminal = False
        while not is_terminal:
            try:
                is_terminal = await self._advance_if_open(running)
            except EngineError as exc:
                _logger.exception("%s is paused", running.id)
                words = "The engine has failed: restart the server to resume the batch."
                running.problem = BatchError(exc.code, words)
                return
            except Exception as exc:
                _logger.exception("%s will be retried", running.id)
                running.problem = _problem_of(exc)
                await asyncio.sleep(self._retry_seconds)
        self._batches.pop(running.id, None)

    async def _advance_if_open(self, running: _RunningBatch) -> bool:
        """Run the next step of a batch; return whether it has ended."""
        stored = await asyncio.to_thread(self._store.batches.get, running.id)
        assert stored is not None, running.id
        if not stored.batch.is_terminal:
            with suppress(InvalidMove):  # it has just been cancelled
                await self._advance(running, stored.batch)
        return stored.batch.is_terminal

    async def _advance(self, running: _RunningBatch, batch: Batch) -> None:
        """Run the next step; a disk error waits for the retry, other errors fail the batch."""
        try:
            await self._run_step(running, batch)
            running.problem = None
        except (OSError, sqlite3.Error) as exc:
            if isinstance(exc, FileNotFoundError) and not self._store.input_path(batch.id).exists():
                words = "The input file has been removed from the server's data folder."
                await self._fail(batch, BatchError(_INPUT_CODES[0], words))
                return
            running.problem = _problem_of(exc)
            _logger.warning("%s will be retried: %s", batch.id, exc)
            await asyncio.sleep(self._retry_seconds)
        except FormatError as exc:
            await self._fail(batch, BatchError(_INPUT_CODES[1], exc.message))
        except RowsGone as exc:
            await self._fail(batch, BatchError("rows_gone", str(exc)))
        except (EngineError, InvalidMove):
            raise
        except Exception:
            _logger.exception("%s failed", batch.id)
            words = "Internal server error: see the server's log."
            await self._fail(batch, BatchError("internal_error", words))

    async def _run_step(self, running: _RunningBatch, batch: Batch) -> None:
        match batch.status:
            case Status.VALIDATING:
                await self._check(running, batch)
            case Status.IN_PROGRESS if not self._is_served(batch):
                await self._wait_for_another_server(running, batch)
            case Status.IN_PROGRESS:
                await self._run_batch(running, batch)
            case Status.FINALIZING if batch.outcome is Status.EXPIRED:
                await asyncio.to_thread(fill_expired, self._store, batch)
                await self._publish(batch, Status.EXPIRED)
            case Status.CANCELLING:
                await self._publish(batch, Status.CANCELLED)
            case _:
                await self._publish(batch, batch.outcome or Status.COMPLETED)

    async def _publish(self, batch: Batch, status: Status, **changes: Any) -> None:
        await asyncio.to_thread(
            lambda: publish(self._store, batch, status, self._clock(), **changes)
        )

    async def _fail(self, batch: Batch, error: BatchError) -> None:
        """Fail a batch; finished rows are kept, unless they are the problem."""
        _logger.error("%s failed: %s", batch.id, error.message)
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
        stored = self._store.batches.get(batch.id)
        assert stored is not None, batch.id
        final = stored.progress.without_rates
        self._store.batches.move(batch.id, status, self._clock(), final=final, **changes)
        self._store.rows_of(batch.id).delete()
        self._store.delete_work(batch.id)

    async def _move(self, batch: Batch, status: Status, **changes: Any) -> Batch:
        return await asyncio.to_thread(
            lambda: self._store.batches.move(batch.id, status, self._clock(), **changes)
        )

    async def _check(self, running: _RunningBatch, batch: Batch) -> None:
        def check_stopped() -> None:
            if running.thread_stop.is_set():
                raise _Interrupted

        async with self._check_slot:
            try:
                checked = await asyncio.to_thread(
                    check_file,
                    self._store.input_path(batch.id),
                    self._models,
                    batch.options,
                    check_stopped,
                    url=batch.endpoint,
                )
            except _Interrupted:
                return
        verdict, findings = checked.verdict, checked.findings
        if verdict.num_errors:
            errors = {"errors": verdict.errors, "num_errors": verdict.num_errors}
            await asyncio.to_thread(self._end, batch, Status.FAILED, errors)
            return
        if checked.blocks is not None:
            await asyncio.to_thread(self._store.input_lines.put, batch.id, checked.blocks)
        await self._move(
            batch,
            Status.IN_PROGRESS,
            model=findings.model,
            num_rows=findings.num_rows,
            expected=findings.expected,
            unknown_parameters=findings.unknown.most_frequent(),
        )

    def _is_served(self, batch: Batch) -> bool:
        return batch.model in self._models.values() or ANY_MODEL in self._models

    async def _wait_for_another_server(self, running: _RunningBatch, batch: Batch) -> None:
        """Keep a batch waiting for a server of its model, until it expires or is cancelled."""
        served = ", ".join(sorted(set(self._models.values())))
        words = (
            f"The batch needs the model {batch.model}, but this server serves {served}: restart it "
            f"with {batch.model}."
        )
        running.problem = BatchError("model_not_served", words)
        seconds = max(0.0, batch.expires_at - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await running.stop.wait()
            return
        await self._move(batch, Status.FINALIZING, outcome=Status.EXPIRED)

    async def _run_batch(self, running: _RunningBatch, batch: Batch) -> None:
        """Run the lines of a batch until all have rows, or it is cancelled or expires."""
        rows = self._store.rows_of(batch.id)
        await asyncio.to_thread(rows.open)
        await asyncio.to_thread(self._note_engine, batch)
        path = self._store.input_path(batch.id)
        echo = await asyncio.to_thread(self._store.echoed_fields, batch)
        run = BatchRun(
            path, rows, self._responder, self._in_flight, batch, turns=self._turns, echo=echo
        )
        running.run = run
        works: tuple[Callable[[], Coroutine[Any, Any, Any]], ...] = (
            running.stop.wait,
            lambda: self._run_in_slot(run, batch.priority),
            lambda: self._flush_often(running, run),
        )
        parts: list[asyncio.Task[Any]] = []
        seconds = max(0.0, batch.expires_at - self._clock())
        try:
            parts.extend(asyncio.create_task(work()) for work in works)
            stopping, working, flushing = parts
            await asyncio.wait(parts, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            await _cancel_all(stopping, working)
            await self._flush_all(running, run)
            if flushing.done():
                flushing.result()
        finally:
            try:
                await _cancel_all(*parts)
                await self._flush(running, run)
            finally:
                await run.close()
                running.run = None
        if not working.cancelled():
            working.result()
            await asyncio.to_thread(self._check_rows, batch)
            await self._move(batch, Status.FINALIZING, outcome=Status.COMPLETED)
        elif not running.stop.is_set():
            await self._move(batch, Status.FINALIZING, outcome=Status.EXPIRED)

    def _note_engine(self, batch: Batch) -> None:
        """Record the engine that runs a batch, unless one is recorded."""
        if batch.engine == EngineInfo():
            info = self._engine.info()
            engine = EngineInfo(info.revision, info.engine_version, info.labels_spans)
            self._store.batches.change(batch.id, engine=engine)

    def _check_rows(self, batch: Batch) -> None:
        """Raise RowsGone unless every line of a batch has its durable row."""
        stored = self._store.batches.get(batch.id)
        num_rows = 0 if stored is None else stored.progress.num_rows
        if num_rows != batch.num_rows:
            raise RowsGone(f"Only {num_rows:,} of {batch.num_rows:,} lines have a row.")

    async def _run_in_slot(self, run: BatchRun, priority: int) -> None:
        async with self._run_slots[priority]:
            await run.run()

    async def _flush_often(self, running: _RunningBatch, run: BatchRun) -> None:
        while not run.is_closed:
            await run.wait_until_due()
            await self._flush_all(running, run)

    async def _flush_all(self, running: _RunningBatch, run: BatchRun) -> None:
        is_durable = False
        while not is_durable:
            is_durable = await self._flush(running, run)
            await asyncio.sleep(0 if is_durable else self._retry_seconds)

    async def _flush(self, running: _RunningBatch, run: BatchRun) -> bool:
        """Make finished rows durable; False on a disk error, with the rows still held."""
        try:
            await run.flush()
        except (OSError, sqlite3.Error, MemoryError, RuntimeError) as exc:
            if running.problem is None:
                _logger.warning("%s cannot write its rows yet: %s", running.id, exc)
            running.problem = _problem_of(exc)
            return False
        running.problem = None
        return True


def _problem_of(exc: Exception) -> BatchError:
    """Return the batch error that clients see while a failed step is retried."""
    if is_full(exc):
        words = "The server's disk is full: free some space, and the batch resumes."
        return BatchError("disk_full", words)
    if not isinstance(exc, (OSError, sqlite3.Error)):
        words = f"The server is out of memory or threads ({type(exc).__name__}: {exc}): retrying."
        return BatchError("out_of_resources", words)
    reason = exc.strerror if isinstance(exc, OSError) else str(exc)
    return BatchError("disk_error", f"Cannot write to the server's data folder: {reason}.")


async def _cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
