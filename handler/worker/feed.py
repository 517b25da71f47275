"""Feeds the engines with lines of the owned shards, in prefix order, with backpressure."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Final, Protocol

from tidemill.batch.file.lines import RawLine
from tidemill.engine_process.canary import Canary
from tidemill.engine_process.client import EngineDied
from tidemill.engine_process.frames import Row

from .gpu_time import EngineLoad, GpuTime
from .prefetch import Prefetch
from .shard.line_order import Rank
from .shard.media_access import is_unread
from .shard.shard_run import EarlyEnd, ShardRun

_LINES_OF_FIRST = 8
"""Lines of a tenant's first batch for each line of another one."""

_UNREAD: Final = "media in S3 cannot be read"
_UNREAD_DELAYS: Final = (2.0, 5.0, 10.0, 20.0)
_UNREAD_RESENT_SECONDS: Final = 60.0


class Engine(Protocol):
    """Answers lines; `engine_process.client.EngineClient` is one."""

    def fetch_row(self, number: int, created: int, data: bytes) -> Awaitable[Row]:
        """Return the row of a line; raises EngineDied if there will be none."""


class Feeds:
    """Feeds of a worker's live engines, which share the lines of its `runs`.

    `hungry` is set while another shard is needed. Engines among the `num_engines` that are not live
    are being started.
    """

    def __init__(
        self,
        runs: Sequence[ShardRun],
        gpu_time: GpuTime,
        prefetch: Prefetch,
        *,
        max_held_bytes: int,
        num_engines: int = 1,
    ) -> None:
        self.runs = runs
        self.gpu_time = gpu_time
        self.num_engines = num_engines
        self.live: list[Feed] = []
        self._is_broken = False
        self.hungry = asyncio.Event()
        self._prefetch = prefetch
        self._max_held_bytes = max_held_bytes

    def add(self, feed: Feed) -> None:
        """Add the feed of an engine that has been started."""
        self.gpu_time.share()
        self.live.append(feed)
        self.gpu_time.engines.append(feed.load)
        self.admit()

    def remove(self, feed: Feed) -> None:
        """Remove the feed of an engine that has died."""
        self.gpu_time.share()
        self._is_broken |= feed.is_broken
        self.live.remove(feed)
        self.gpu_time.engines.remove(feed.load)

    def admit(self) -> None:
        """Admit lines up to the limits; called whenever something has changed."""
        for feed in self.live:
            feed.admit()

    @property
    def is_broken(self) -> bool:
        """Return whether any engine, dead or alive, has shown a fault of the machine."""
        return self._is_broken or any(feed.is_broken for feed in self.live)

    async def check_machine(self) -> bool:
        """Return whether rows of any engine may be stored."""
        for feed in tuple(self.live):
            self._is_broken |= not await feed.check_machine()
        return not self.is_broken

    def close(self) -> None:
        """Stop admitting lines."""
        for feed in self.live:
            feed.close()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await asyncio.gather(*(feed.drained() for feed in self.live))

    def ready_runs(self) -> list[ShardRun]:
        """Return the runs that have lines to be admitted and that no feed has taken."""
        return [run for run in self.runs if run.is_open and not run.is_ending]

    def share_of(self, max_inflight: int) -> int:
        """Return the maximum number of lines of one engine: its share of the available lines."""
        if self.num_engines == 1:
            return max_inflight
        left = sum(run.pending.num_waiting for run in self.ready_runs())
        left += sum(feed.num_inflight for feed in self.live)
        return min(max_inflight, max(1, -(-left // len(self.live))))

    def has_memory(self, feed: Feed) -> bool:
        """Return whether there is memory for more lines of an engine: each has an equal share."""
        left = self._max_held_bytes - sum(run.num_held_bytes for run in self.runs)
        inflight_bytes = sum(one.inflight_bytes for one in self.live)
        return inflight_bytes < left and feed.inflight_bytes * len(self.live) < left

    def is_least_loaded(self, feed: Feed) -> bool:
        """Return whether no engine has fewer lines; an engine that is being started has none."""
        is_whole = len(self.live) == self.num_engines
        return is_whole and feed is min(self.live, key=lambda one: one.num_inflight)

    def update_hunger(self) -> None:
        """Update whether another shard is needed; never while all engines have suspects."""
        live = [feed for feed in self.live if feed.is_open]
        max_inflight = sum(feed.max_inflight for feed in live)
        num_with_suspects = sum(run.pending.has_suspects for run in self.runs)
        if live and self._prefetch.wants_shard(max_inflight) and num_with_suspects < len(live):
            self.hungry.set()
        else:
            self.hungry.clear()


class Feed:
    """Keeps one engine full, while it lives, with lines that it shares with others of `feeds`.

    `died` gets the reason once the engine has died. The `canary` runs before all lines: if the
    engine dies of it, or its row shows a fault, the machine `is_broken`, and no line is to blame.
    """

    def __init__(
        self,
        engine: Engine,
        feeds: Feeds,
        load: EngineLoad,
        *,
        max_inflight: int,
        max_num_seqs: int = 1,
        canary: Canary | None = None,
    ) -> None:
        self._engine = engine
        self._feeds = feeds
        self.load = load
        self.max_inflight = max_inflight
        self._max_num_seqs = max_num_seqs
        self.num_answered = 0
        self.is_broken = False
        self._canary = canary
        self._is_checked = canary is None
        self._num_failures = 0  # failed steps when the canary last succeeded
        self._checking: asyncio.Task[None] | None = None
        self.is_open = True
        self._is_full = False
        self._trial: ShardRun | None = None  # the run whose suspects the engine has
        self.num_inflight = 0
        self.inflight_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def admit(self) -> None:
        """Admit lines up to the limits; called whenever something has changed."""
        self._feeds.gpu_time.share()
        if self.is_open and self._canary is not None and self._checking is None:
            self._start_canary(self._canary)
        while self.is_open and self._is_checked and self._has_room():
            found = self._next_line()
            if found is None:
                break
            self._send(*found)
        self._feeds.update_hunger()

    @property
    def death(self) -> str | None:
        """Return the reason of the engine's death, or None."""
        is_dead = self.died.done() and self.died.exception() is None
        return self.died.result() if is_dead else None

    def close(self) -> None:
        """Stop admitting lines."""
        self.is_open = False

    def fail(self, failure: BaseException) -> None:
        """End the feed by an unexpected exception, for the worker to raise."""
        self.close()
        if not self.died.done():
            self.died.set_exception(failure)

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def _has_room(self) -> bool:
        """Return whether another line may be admitted.

        With several engines, lines are admitted by the quarter: lines with a common prefix are next
        to each other, so most of them go to one engine.
        """
        most = self._feeds.share_of(self.max_inflight)
        several = max(1, min(most // 4, most - self._max_num_seqs))
        refill = 1 if self._feeds.num_engines == 1 else several
        if self.num_inflight > most - (refill if self._is_full else 1):
            self._is_full = True
            return False
        self._is_full = False
        return not self.num_inflight or self._feeds.has_memory(self)

    def _next_line(self) -> tuple[ShardRun, RawLine] | None:
        """Return the next line and its run; suspects run alone in the engine.

        Batches take turns: the batch with the fewest lines in flight is next. One that another of
        its tenant comes before gets an eighth as many.
        """
        ready = self._feeds.ready_runs()
        if self._trial is not None and (
            self._trial not in ready or not self._trial.pending.is_on_trial
        ):
            self._trial = None
        if self._trial is None:
            waiting = [run for run in ready if run.pending.has_waiting_group]
            if waiting and not self.num_inflight:
                self._trial = waiting[0]
            elif waiting and self._feeds.is_least_loaded(self):
                return None  # they come once the engine is idle
        if self._trial is not None:
            suspect = self._trial.pending.pop_suspect()
            return None if suspect is None else (self._trial, suspect)
        num_inflight = Counter[str]()
        first: dict[str, int] = {}  # priority, by tenant
        for run in ready:
            num_inflight[run.batch.id] += run.pending.num_inflight
            if run.pending.has_next:
                tenant, priority = run.batch.tenant, run.batch.priority
                first[tenant] = min(priority, first.get(tenant, priority))

        def turn(run: ShardRun) -> tuple[int, Rank]:
            is_first = run.batch.priority == first[run.batch.tenant]
            weight = 1 if is_first else _LINES_OF_FIRST
            return weight * num_inflight[run.batch.id], run.pending.next_rank

        next_run = min((run for run in ready if run.pending.has_next), key=turn, default=None)
        line = None if next_run is None else next_run.pending.pop()
        return None if next_run is None or line is None else (next_run, line)

    def _send(self, run: ShardRun, line: RawLine) -> None:
        self.num_inflight += 1
        self.inflight_bytes += len(line.data)
        self._idle.clear()
        self.load.add(run, line.number)
        request = asyncio.create_task(self._run_line(run, line))
        run.requests.add(request)
        request.add_done_callback(lambda task: self._done(run, line, task))

    async def check_machine(self) -> bool:
        """Return whether rows may be stored; after a failed step the canary must succeed first.

        It then runs alongside lines. Rows that were finished before the engine's death are stored.
        """
        num_failures = self.load.stats().failures
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
        self.num_inflight += 1
        self._idle.clear()
        self._checking = asyncio.create_task(self._run_canary(canary))
        self._checking.add_done_callback(self._canary_done)

    async def _run_canary(self, canary: Canary) -> None:
        """Run the canary; raises EngineDied if it shows a fault."""
        is_alone = not self._is_checked
        try:
            row = await self._engine.fetch_row(1, 0, canary.line)
        except EngineDied:
            self.is_broken = is_alone  # otherwise a line may be the cause
            raise
        fault = canary.find_fault(row)
        if fault is not None:
            self.is_broken = True
            raise EngineDied(fault)
        self._is_checked = True

    def _canary_done(self, task: asyncio.Task[None]) -> None:
        self.num_inflight -= 1
        self._go_on_after(None if task.cancelled() else task.exception())

    async def _run_line(self, run: ShardRun, line: RawLine) -> None:
        run.meter.begin_row()
        started_ns = time.time_ns()
        row = await self._row_of(run, line)
        run.span.add(line, row, started_ns)
        self.num_answered += 1
        self._feeds.gpu_time.share()
        run.finish(line, row)

    async def _row_of(self, run: ShardRun, line: RawLine) -> Row:
        """Return the row of a line; while its media in S3 cannot be read, it is run again.

        After the last delay the shard is released: a failure of S3 must not fail lines.
        """
        data = run.cascade.line_of(line).data
        for delay in (*_UNREAD_DELAYS, None):
            row = await self._engine.fetch_row(line.number, run.batch.created_at, data)
            if not is_unread(row):
                return row
            if delay is not None:
                await asyncio.sleep(delay)
        run.end(EarlyEnd(_UNREAD, is_resent=True, delay_seconds=_UNREAD_RESENT_SECONDS))
        raise asyncio.CancelledError

    def _done(self, run: ShardRun, line: RawLine, task: asyncio.Task[None]) -> None:
        run.requests.discard(task)
        self.num_inflight -= 1
        self.inflight_bytes -= len(line.data)
        if not task.cancelled():
            failure = task.exception()
        else:  # cancelled by its run, which has ended; otherwise the line would never get its row
            failure = None if run.is_ending else RuntimeError("a request was cancelled")
        if failure is None:  # otherwise the engine died with it
            self.load.remove(run, line.number)
        self._go_on_after(failure)

    def _go_on_after(self, failure: BaseException | None) -> None:
        if isinstance(failure, EngineDied):
            self.is_broken |= failure.is_broken
            self.close()
            if not self.died.done():
                self.died.set_result(failure.reason)
        elif failure is not None:
            self.fail(failure)
        if not self.num_inflight:
            self._idle.set()
        self.admit()
