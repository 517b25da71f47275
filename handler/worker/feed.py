"""Feeds the engine with lines of the owned shards, in prefix order, with backpressure."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from tidemill.batch.file.lines import RawLine

from .canary import Canary
from .engine_client import EngineDied
from .engine_process.frames import Row
from .gpu_time import GpuTime
from .prefetch import Prefetch
from .shard.shard_run import ShardRun


class Engine(Protocol):
    """Answers lines; `engine_client.EngineClient` does."""

    async def fetch_row(self, number: int, created: int, data: bytes) -> Row:
        """Return the row of a line; raises EngineDied when there will be none."""


class Feed:
    """Keeps one engine full, for as long as it lives. `runs` is shared with its owner.

    `died` gets the reason once the engine has died, `hungry` is set while another shard is needed.
    The `canary` runs before all lines: if the engine dies of it, or its row shows a fault, the
    machine `is_broken`, and no line is to blame.
    """

    def __init__(
        self,
        engine: Engine,
        runs: Sequence[ShardRun],
        gpu_time: GpuTime,
        prefetch: Prefetch,
        *,
        max_inflight: int,
        max_held_bytes: int,
        canary: Canary | None = None,
    ) -> None:
        self._engine = engine
        self._runs = runs
        self._gpu_time = gpu_time
        self._prefetch = prefetch
        self._max_inflight = max_inflight
        self._max_held_bytes = max_held_bytes
        self.num_answered = 0
        self.is_broken = False
        self._canary = canary
        self._is_checked = canary is None
        self._num_failures = 0  # failed steps when the canary last succeeded
        self._checking: asyncio.Task[None] | None = None
        self._is_open = True
        self._num_inflight = 0
        self._inflight_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.hungry = asyncio.Event()
        self.hungry.set()

    def admit(self) -> None:
        """Admit lines up to the limits; called whenever something has changed."""
        self._gpu_time.share()
        if self._is_open and self._canary is not None and self._checking is None:
            self._start_canary(self._canary)
        while self._is_open and self._is_checked and self._has_room():
            run = self._next_run()
            line = run.pending.pop() if run is not None else None
            if run is None or line is None:
                break
            self._send(run, line)
        if self._wants_more():
            self.hungry.set()
        else:
            self.hungry.clear()

    @property
    def death(self) -> str | None:
        """Return the reason of the engine's death, or None."""
        is_told = self.died.done() and self.died.exception() is None
        return self.died.result() if is_told else None

    def close(self) -> None:
        """Stop admitting lines."""
        self._is_open = False

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def _has_room(self) -> bool:
        held_bytes = self._inflight_bytes + sum(run.num_held_bytes for run in self._runs)
        return self._num_inflight < self._max_inflight and (
            held_bytes < self._max_held_bytes or not self._num_inflight
        )

    def _wants_more(self) -> bool:
        """Say whether another shard is to be claimed; never beside suspects."""
        return (
            self._is_open
            and self._prefetch.wants_shard(self._max_inflight)
            and not any(run.pending.is_exclusive for run in self._runs)
        )

    def _next_run(self) -> ShardRun | None:
        """Return the run whose line is next; suspects wait until nothing else is in flight.

        Batches take turns: the one that has the fewest lines in flight.
        """
        ready = [run for run in self._runs if run.is_open and not run.is_ending]
        for run in ready:
            if run.pending.is_exclusive:
                return run if run.pending.num_inflight == self._num_inflight else None
        num_inflight = Counter[str]()
        for run in ready:
            num_inflight[run.batch.id] += run.pending.num_inflight
        return min(
            (run for run in ready if run.pending.num_waiting),
            key=lambda run: (num_inflight[run.batch.id], run.pending.next_rank),
            default=None,
        )

    def _send(self, run: ShardRun, line: RawLine) -> None:
        self._num_inflight += 1
        self._inflight_bytes += len(line.data)
        self._idle.clear()
        request = asyncio.create_task(self._run_line(run, line))
        run.requests.add(request)
        request.add_done_callback(lambda task: self._done(run, line, task))

    async def check_machine(self) -> bool:
        """Say whether rows may be kept; after a failed step the canary must succeed first.

        It then runs beside lines. Rows that were finished before the engine's death are kept.
        """
        num_failures = self._gpu_time.stats().failures
        if self._canary is None or num_failures == self._num_failures or self.died.done():
            return not self.is_broken
        if self._checking is None or self._checking.done():
            self._start_canary(self._canary)
        assert self._checking is not None
        await asyncio.wait((self._checking,))
        if not self.died.done():
            self._num_failures = num_failures
        return not self.is_broken

    def _start_canary(self, canary: Canary) -> None:
        self._num_inflight += 1
        self._idle.clear()
        self._checking = asyncio.create_task(self._run_canary(canary))
        self._checking.add_done_callback(self._canary_done)

    async def _run_canary(self, canary: Canary) -> None:
        """Run the canary; raises EngineDied where it shows a fault."""
        is_alone = not self._is_checked
        try:
            row = await self._engine.fetch_row(1, 0, canary.line)
        except EngineDied:
            self.is_broken = is_alone  # else a line may be the cause
            raise
        fault = canary.find_fault(row)
        if fault is not None:
            self.is_broken = True
            raise EngineDied(fault)
        self._is_checked = True

    def _canary_done(self, task: asyncio.Task[None]) -> None:
        self._num_inflight -= 1
        self._go_on_after(None if task.cancelled() else task.exception())

    async def _run_line(self, run: ShardRun, line: RawLine) -> None:
        row = await self._engine.fetch_row(line.number, run.batch.created_at, line.data)
        self.num_answered += 1
        self._gpu_time.share()
        run.finish(line, row)

    def _done(self, run: ShardRun, line: RawLine, task: asyncio.Task[None]) -> None:
        run.requests.discard(task)
        self._num_inflight -= 1
        self._inflight_bytes -= len(line.data)
        self._go_on_after(None if task.cancelled() else task.exception())

    def _go_on_after(self, failure: BaseException | None) -> None:
        if isinstance(failure, EngineDied):
            self.is_broken |= failure.is_broken
            self.close()
            if not self.died.done():
                self.died.set_result(failure.reason)
        elif failure is not None and not self.died.done():
            self.close()
            self.died.set_exception(failure)
        if not self._num_inflight:
            self._idle.set()
        self.admit()
