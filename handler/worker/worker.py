"""Worker loop: starts an engine, keeps it full with shards, and hands over at the end."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Protocol
from uuid import uuid4

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import EngineInfo
from tidemill.protocol.contract import EngineInfo as LoadedEngine
from tidemill.protocol.contract import EngineStats

from ..aws.queues import Message
from ..errors import AwsError
from ..observability import Metric, logger
from .canary import Canary, canary_line
from .context.context import WorkerContext
from .engine_client import EngineDied, EngineFailed
from .feed import Engine, Feed
from .gpu_time import GpuTime
from .heartbeat import Heartbeat
from .prefetch import Prefetch
from .shard.claim import claim_shard, note_engine
from .shard.message import ShardMessage
from .shard.pending_lines import Verdict
from .shard.rows import compact
from .shard.shard_run import EarlyEnd, ShardRun

# After the grace period for requests: to flush finished rows and release the shards.
_HAND_OVER_SECONDS = 20.0
_HANDLING_SECONDS = 5.0
_LAST_SECONDS = 5.0
_MAX_BACKOFF_SECONDS = 30.0
# A worker that stays renews its place when it was idle as long again: at the next poll.
_READY_SECONDS = 60
# A minute of failed polls: an idle worker that may exit costs money for nothing.
_MAX_FAILED_POLLS = 6
# Bisecting 4,096 suspects down to one takes twelve deaths; more than that in a row without a row
# means that the engine or its device is broken.
MAX_BARREN_LIVES = 16
_BROKEN = "this machine cannot run a known line"
# No request can be blamed for a death while the model loads, which may take minutes.
MAX_FAILED_STARTS = 5


class MachineBroken(HandlerError):
    """The engine cannot run the canary: failures of other lines on this machine mean nothing."""

    code = "machine_broken"


class QueueUnreachable(HandlerError):
    """The queue cannot be polled, and no shard is held: the worker ends, others may reach it."""

    code = "nothing_comes"


class EngineHandle(Engine, Protocol):
    """An engine process; `engine_client.EngineClient` is one."""

    @property
    def stats(self) -> EngineStats:
        """Return the last statistics of the engine."""

    async def start(self) -> LoadedEngine:
        """Load the model; raises EngineFailed when that fails."""

    async def close(self) -> None:
        """End the process."""


class Worker:
    """Runs shards until it is stopped, idle for long enough, or has no engine."""

    def __init__(self, context: WorkerContext, make_client: Callable[[], EngineHandle]) -> None:
        self._context = context
        self._make_client = make_client
        self._runs: list[ShardRun] = []
        self._working: set[asyncio.Task[None]] = set()
        self._gpu_time = GpuTime(context, self._runs)
        self._prefetch = Prefetch(context, self._runs)
        self._heartbeat = Heartbeat(context, self._runs, self._gpu_time, self._prefetch)
        self._stopped = asyncio.Event()
        self._handling = asyncio.Lock()
        self._polling: asyncio.Task[list[Message]] | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._busy_at = context.clock()
        # SageMaker gives all of its hosts one name.
        self._id = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex}"
        self._num_claims = count()
        self._num_barren_lives = 0
        self._num_failed_starts = 0
        self._canary: Canary | None = None

    def stop(self) -> None:
        """Stop claiming work, finish or release the shards, and return from `run`."""
        self._stopped.set()

    async def run(self) -> int:
        """Return the exit status: 0 when stopped or idle, 1 when it cannot go on."""
        beating = asyncio.create_task(self._heartbeat.run())
        try:
            while True:
                client = self._make_client()
                try:
                    has_died = await self._run_engine(client, beating)
                except EngineFailed as exc:
                    if not await self._may_start_again(exc, beating):
                        return 1
                    has_died = True
                except (MachineBroken, QueueUnreachable) as exc:
                    logger.error(str(exc))
                    return 1
                finally:
                    await client.close()
                if not has_died or self._stopped.is_set():
                    return 0
                if self._num_barren_lives >= MAX_BARREN_LIVES:
                    logger.error("engine dies of everything", num_lives=self._num_barren_lives)
                    return 1
        finally:
            await _cancel(beating)
            if self._returning:
                limit = self._context.config.wait_seconds + _HANDLING_SECONDS
                _, late = await asyncio.wait(self._returning, timeout=limit)
                await _cancel(*late)
            self._context.emit(self._context.usage_meter.collect())
            await self._write_last_usage()

    async def _write_last_usage(self) -> None:
        """Write the rest of the GPU time and of the history, if that is quick."""
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                await self._context.write_gpu_usage()
                await self._context.write_history()
        except (AwsError, TimeoutError) as exc:
            logger.warning("usage not told", reason=repr(exc))

    async def _may_start_again(self, failure: EngineFailed, beating: asyncio.Task[None]) -> bool:
        """Wait with backoff before the restart of an engine that died while loading.

        False to give up: an engine that reported why it cannot be started would fail again.
        """
        self._context.emit({Metric.ENGINE_DEATHS: 1})
        self._num_failed_starts += 1
        if failure.code != EngineDied.code or self._num_failed_starts >= MAX_FAILED_STARTS:
            logger.error("engine cannot be started", reason=str(failure), code=failure.code)
            return False
        seconds = min(_MAX_BACKOFF_SECONDS, 2.0 ** (self._num_failed_starts - 1))
        logger.error("engine died while starting", reason=str(failure), next_try_seconds=seconds)
        stopped = asyncio.create_task(self._stopped.wait())
        waited = asyncio.create_task(asyncio.sleep(seconds))
        try:
            await _first(stopped, waited, beating)
        finally:
            await _cancel(stopped, waited)
        return True

    async def _run_engine(self, client: EngineHandle, beating: asyncio.Task[None]) -> bool:
        """Run one engine to its end; return whether it died."""
        stopped = asyncio.create_task(self._stopped.wait())
        starting = asyncio.create_task(client.start())
        try:
            await _first(starting, stopped, beating)
            if not starting.done():
                return False
            engine = starting.result()
        finally:
            await _cancel(starting, stopped)
        self._num_failed_starts = 0
        logger.info(
            "engine ready",
            model=engine.model,
            device=engine.device,
            notes=engine.notes,
            load_seconds=dict(engine.load_seconds),
        )
        self._heartbeat.start("parity results", self._context.write_parity_results)
        if self._context.cold_start.reach("ready"):
            steps = engine.load_seconds.items()
            self._context.cold_start.note(
                **{f"engine_{step}_seconds": took for step, took in steps}
            )
        return await self._serve(client, engine, beating)

    async def _serve(
        self, client: EngineHandle, engine: LoadedEngine, beating: asyncio.Task[None]
    ) -> bool:
        config = self._context.config
        self._gpu_time.num_gpus = engine.num_gpus
        self._gpu_time.stats = lambda: client.stats
        feed = Feed(
            client,
            self._runs,
            self._gpu_time,
            self._prefetch,
            max_inflight=config.inflight_for(engine.max_num_seqs),
            max_held_bytes=config.max_held_bytes,
            canary=self._canary_for(engine),
        )
        feed.admit()
        info = EngineInfo(engine.revision, engine.engine_version)
        receiving = asyncio.create_task(self._receive(feed, info))
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await _first(receiving, stopped, feed.died, beating)
        finally:
            feed.close()
            await self._stop_receiving(receiving)
            await _cancel(stopped)
            if not feed.died.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(feed.drained(), config.grace_seconds)
            await self._end_runs(feed)
        return self._record_death(feed)

    def _canary_for(self, engine: LoadedEngine) -> Canary | None:
        """Return the canary of this worker, the same for all its engines."""
        line = canary_line(engine.endpoints)
        if self._canary is None and line is not None:
            self._canary = Canary(line)
        return self._canary

    async def _receive(self, feed: Feed, info: EngineInfo) -> None:
        """Claim shards as the feed needs them; return when idle for `exit_when_idle_seconds`.

        It never returns while it holds a shard, nor before a poll found the queue empty; a message
        without a runnable shard does not count as work. Raises QueueUnreachable where polls have
        failed for as long.
        """
        config, num_failures = self._context.config, 0
        limit = config.exit_when_idle_seconds
        wait_seconds = min(config.wait_seconds, max(1, math.ceil(limit or config.wait_seconds)))
        self._busy_at = self._context.clock()
        while True:
            await feed.hungry.wait()
            try:
                self._polling = asyncio.create_task(self._poll(wait_seconds))
                messages = await asyncio.shield(self._polling)
                async with self._handling:
                    self._polling = None
                    for message in messages:
                        await self._handle_message(feed, info, ShardMessage(self._context, message))
                num_failures = 0
                if not messages and self._is_idle(limit) and not await self._stays_ready():
                    logger.info("idle", seconds=limit)
                    return
            except HandlerError as exc:  # one message's failure must not stop the next
                self._polling = None
                num_failures += 1
                if num_failures > _MAX_FAILED_POLLS and self._is_idle(limit):
                    raise QueueUnreachable(f"no work can be taken: {exc}") from exc
                logger.warning("receiving failed", reason=str(exc))
                await asyncio.sleep(min(_MAX_BACKOFF_SECONDS, 2.0 ** (num_failures - 1)))

    def _is_idle(self, limit: float | None) -> bool:
        """Say whether the worker has been idle for its limit, if it has one."""
        is_due = limit is not None and self._context.clock() >= self._busy_at + limit
        return is_due and not self._runs

    async def _stays_ready(self) -> bool:
        """Say whether this idle worker is one of those that stay at this hour, and for how long.

        The others are not missed: the reaper starts more where fewer than these run.
        """
        context, now = self._context, self._context.wall()
        least = context.config.min_workers_at(now)
        if not least or context.model is None:
            return False
        until = now + (context.config.exit_when_idle_seconds or 0) + _READY_SECONDS
        fleets = context.deployment.fleets
        keep = fleets.keep_ready(context.model, least, self._id, now=now, until=until)
        if is_kept := await context.aws.run(keep):
            self._busy_at = context.clock()
        return is_kept

    async def _poll(self, wait_seconds: int) -> list[Message]:
        return await self._context.aws.run(
            self._context.queue.receive(
                wait_seconds=wait_seconds,
                visibility_seconds=self._context.config.visibility_seconds,
            )
        )

    async def _handle_message(self, feed: Feed, info: EngineInfo, message: ShardMessage) -> None:
        """Handle one message: claim its shard and start to run it."""
        for run in self._runs:
            if run.message.target == message.target and not run.is_over:
                await run.message.take_over(message)
                return
        owner = f"{self._id}-{next(self._num_claims)}"
        claim = await claim_shard(self._context, message, owner=owner)
        if claim is None:
            return
        order = self._prefetch.order_of(claim.batch.id)
        run = ShardRun(claim, self._context, order, feed.admit, feed.check_machine)
        self._runs.append(run)
        self._heartbeat.beat()
        working = asyncio.create_task(run.work())
        self._working.add(working)
        working.add_done_callback(lambda task: self._done(feed, run, task))
        feed.admit()
        await note_engine(self._context, claim.batch, info)

    def _done(self, feed: Feed, run: ShardRun, working: asyncio.Task[None]) -> None:
        self._working.discard(working)
        self._runs.remove(run)
        heir = next((each for each in self._runs if each.batch.id == run.batch.id), None)
        if heir is None:
            self._context.keep_pace(run.batch.id, run.pace)
        else:
            heir.pace.merge(run.pace)
            self._heartbeat.beat()  # else its batch seems stalled until the next beat
        self._busy_at = self._context.clock()
        feed.admit()

    async def _stop_receiving(self, receiving: asyncio.Task[None]) -> None:
        """Stop receiving; a message that is being handled is finished.

        A long poll goes on in SQS after its caller has left, and would swallow the next message:
        it is awaited, and its messages are sent again.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_HANDLING_SECONDS), self._handling:
                receiving.cancel()
        await _cancel(receiving)
        polling, self._polling = self._polling, None
        if polling is not None:
            returning = asyncio.create_task(self._put_back(polling))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    async def _put_back(self, polling: asyncio.Task[list[Message]]) -> None:
        """Resend messages that were received too late to be handled."""
        try:
            for received in await polling:
                message = ShardMessage(self._context, received)
                if message.target is not None:
                    await message.resend()
        except AwsError as exc:  # they reappear after their visibility timeout
            logger.warning("message left behind", reason=str(exc))

    async def _end_runs(self, feed: Feed) -> None:
        """Release every unfinished shard, with its suspects if the engine has died."""
        reason = feed.death
        for run in self._runs:
            if reason is None:
                run.end(EarlyEnd("the worker stops", is_resent=True))
            else:
                verdict = None if feed.is_broken else _judge(run, reason)
                run.end(EarlyEnd("the engine died", is_resent=True, verdict=verdict))
        if self._working:
            _, late = await asyncio.wait(self._working, timeout=_HAND_OVER_SECONDS)
            await _cancel(*late)

    def _record_death(self, feed: Feed) -> bool:
        """Return whether the engine has died; raises an unexpected error of the feed.

        Raises MachineBroken where no line was the cause.
        """
        if not feed.died.done():
            return False
        reason = feed.died.result()
        logger.error("engine died", reason=reason, num_answered=feed.num_answered)
        self._context.emit({Metric.ENGINE_DEATHS: 1})
        if feed.is_broken:
            raise MachineBroken(_BROKEN)
        self._num_barren_lives = 0 if feed.num_answered else self._num_barren_lives + 1
        return True


def _judge(run: ShardRun, reason: str) -> Verdict:
    """Return the suspects among a shard's lines after the engine's death, and log them."""
    verdict = run.pending.judge() if run.is_open else Verdict(run.shard.suspects)
    suspects = [compact(group) for group in verdict.suspects]
    logger.error("engine died", reason=reason, suspects=suspects, **run.labels)
    for line in verdict.quarantined:
        logger.error("quarantined", line=line, **run.labels)
    return verdict


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Wait until one task is done; raises its exception."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if isinstance(task, asyncio.Task):
            task.result()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
