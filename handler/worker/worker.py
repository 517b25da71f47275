"""Worker loop: starts engines, keeps them full with shards, and hands over at the end."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NoReturn, Protocol
from uuid import uuid4

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import EngineInfo
from tidemill.batch.suspects import Verdict
from tidemill.engine_process.canary import Canary, canary_line
from tidemill.engine_process.client import EngineFailed
from tidemill.net.backoff import exponential_delay
from tidemill.protocol.callback_failures import callback_failures
from tidemill.protocol.contract import EngineInfo as LoadedEngine
from tidemill.protocol.contract import EngineStats

from ..aws.queues import Message
from ..errors import AwsError
from ..observability import Metric, logger
from .context.context import WorkerContext
from .engine_restarts import MAX_BACKOFF_SECONDS, EngineGivenUp, EngineRestarts
from .feed import Engine, Feed, Feeds
from .gpu_time import EngineLoad, GpuTime
from .heartbeat import Heartbeat
from .prefetch import Prefetch
from .shard.claim import claim_shard, note_engine
from .shard.message import ShardMessage
from .shard.shard_run import EarlyEnd, ShardRun

# After the grace period for requests: time to flush finished rows and release the shards.
_HAND_OVER_SECONDS = 20.0
_HANDLING_SECONDS = 5.0
_LAST_SECONDS = 5.0
# A worker that stays renews its place after being idle as long again: at the next poll.
_READY_SECONDS = 60
# A minute of failed polls: an idle worker that may exit costs money for nothing.
_MAX_FAILED_POLLS = 6
_BROKEN = "this machine cannot run a known line"


class MachineBroken(HandlerError):
    """The engine cannot run the canary: failures of other lines on this machine prove nothing."""

    code = "machine_broken"


class QueueUnreachable(HandlerError):
    """The queue cannot be polled, and no shard is held: the worker ends, others may reach it."""

    code = "nothing_comes"


class EngineHandle(Engine, Protocol):
    """An engine process; `engine_process.client.EngineClient` is one."""

    @property
    def stats(self) -> EngineStats:
        """Return the last statistics of the engine."""

    async def start(self) -> LoadedEngine:
        """Load the model; raises EngineFailed if that fails."""

    async def close(self) -> None:
        """End the process."""


class Worker:
    """Runs shards until it is stopped, idle for long enough, or gives up an engine.

    There is an engine for each of `make_clients`, which creates a client for each of its lives. All
    engines have lines of the same shards. The death of one makes its lines suspects; the death of
    the last live one releases all shards.
    """

    def __init__(self, context: WorkerContext, *make_clients: Callable[[], EngineHandle]) -> None:
        num_engines = len(make_clients)
        self._context = context
        self._make_clients = make_clients
        self._runs: list[ShardRun] = []
        self._working: set[asyncio.Task[None]] = set()
        gpu_time = GpuTime(context, self._runs)
        self._prefetch = Prefetch(context, self._runs, num_engines=num_engines)
        self._heartbeat = Heartbeat(context, self._runs, gpu_time, self._prefetch)
        self._feeds = Feeds(
            self._runs,
            gpu_time,
            self._prefetch,
            max_held_bytes=context.config.max_held_bytes,
            num_engines=num_engines,
        )
        self._stopped = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engines_change = asyncio.Lock()
        self._handling = asyncio.Lock()
        self._receiving: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[list[Message]] | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._busy_at = context.clock()
        # SageMaker gives all of its hosts the same name.
        self._id = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex}"
        self._num_claims = count()
        self._canary: Canary | None = None

    def stop(self) -> None:
        """Stop claiming work, finish or release the shards, and return from `run`."""
        self._stopped.set()

    async def run(self) -> int:
        """Return the exit status: 0 if stopped or idle, 1 if it cannot continue.

        Raises an unexpected error, once all shards are released.
        """
        with callback_failures(self._fail):
            return await self._run()

    def _fail(self, failure: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(failure)

    async def _run(self) -> int:
        beating = asyncio.create_task(self._heartbeat.run())
        stopped = asyncio.create_task(self._stopped.wait())
        lives = [
            asyncio.create_task(self._run_engine(number, make))
            for number, make in enumerate(self._make_clients, start=1)
        ]
        try:
            try:
                await _first(stopped, self._failed, beating, *lives)
            finally:
                await self._hand_over()
        except (MachineBroken, QueueUnreachable) as exc:
            logger.error(str(exc))
            return 1
        except EngineGivenUp:
            return 1
        else:
            return 0
        finally:
            await _cancel(stopped, *lives)
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
            logger.warning("usage not recorded", reason=repr(exc))

    async def _run_engine(self, number: int, make_client: Callable[[], EngineHandle]) -> NoReturn:
        """Run one engine, and restart it after its death; raises EngineGivenUp."""
        restarts = EngineRestarts(self._context)
        while True:
            client = make_client()
            try:
                engine = await client.start()
                restarts.record_start()
                restarts.record_death(await self._serve(number, client, engine))
            except EngineFailed as exc:
                await restarts.back_off(exc)
            finally:
                await client.close()

    async def _serve(self, number: int, client: EngineHandle, engine: LoadedEngine) -> int:
        """Feed an engine until it dies; return how many lines it has answered."""
        logger.info(
            "engine ready",
            engine=number,
            model=engine.model,
            device=engine.device,
            notes=engine.notes,
            load_seconds=dict(engine.load_seconds),
        )
        self._heartbeat.start("parity results", self._context.write_parity_results)
        self._heartbeat.start(
            "endpoints", partial(self._context.write_endpoints, tuple(engine.endpoints))
        )
        if self._context.cold_start.reach("ready"):
            steps = engine.load_seconds.items()
            self._context.cold_start.note(
                **{f"engine_{step}_seconds": took for step, took in steps}
            )
        async with self._engines_change:
            feed = Feed(
                client,
                self._feeds,
                EngineLoad(engine.num_gpus, lambda: client.stats),
                max_inflight=self._context.config.inflight_for(engine.max_num_seqs),
                max_num_seqs=engine.max_num_seqs,
                canary=self._canary_for(engine),
            )
            self._feeds.add(feed)
            self._start_receiving(
                EngineInfo(engine.revision, engine.engine_version, engine.labels_spans)
            )
        await asyncio.wait((feed.died,))
        async with self._engines_change:
            await self._lose(feed)
        return feed.num_answered

    def _canary_for(self, engine: LoadedEngine) -> Canary | None:
        """Return the canary of this worker, the same for all its engines."""
        line = canary_line(engine.endpoints)
        if self._canary is None and line is not None:
            self._canary = Canary(line)
        return self._canary

    async def _lose(self, feed: Feed) -> None:
        """Make suspects of a dead engine's lines; the last engine's death releases all shards.

        Raises an unexpected error of the feed, and MachineBroken if no line was the cause.
        """
        feed.close()
        if len(self._feeds.live) == 1:
            await self._stop_receiving()
            await self._end_runs()
        elif feed.death is not None and not self._feeds.is_broken:
            with suppress(TimeoutError):  # all of its requests fail at once
                await asyncio.wait_for(feed.drained(), _HANDLING_SECONDS)
            for run, lost in tuple(feed.load.lines.items()):
                if run.is_open and not run.is_over:
                    run.lose_engine(lost, feed.death)
        self._feeds.remove(feed)
        self._feeds.admit()
        self._record_death(feed)

    async def _hand_over(self) -> None:
        """Stop receiving, let requests finish for a while, and release the shards."""
        async with self._engines_change:
            self._feeds.close()
            await self._stop_receiving()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._feeds.drained(), self._context.config.grace_seconds)
            await self._end_runs()
            for feed in self._feeds.live:
                if feed.died.done():
                    self._record_death(feed)

    def _start_receiving(self, info: EngineInfo) -> None:
        if self._receiving is None and not self._stopped.is_set():
            self._receiving = asyncio.create_task(self._receive(info))
            self._receiving.add_done_callback(self._received)

    def _received(self, receiving: asyncio.Task[None]) -> None:
        """Stop the worker once it is idle, or fail with the error that ended receiving."""
        failure = None if receiving.cancelled() else receiving.exception()
        if failure is not None:
            self._fail(failure)
        elif not receiving.cancelled():
            self.stop()

    async def _receive(self, info: EngineInfo) -> None:
        """Claim shards as the feeds need them; return when idle for `exit_when_idle_seconds`.

        It never returns while it holds a shard, nor before a poll found the queue empty; a message
        without a runnable shard does not count as work. Raises QueueUnreachable if polls have
        failed for as long.
        """
        config, num_failures = self._context.config, 0
        limit = config.exit_when_idle_seconds
        wait_seconds = min(config.wait_seconds, max(1, math.ceil(limit or config.wait_seconds)))
        self._busy_at = self._context.clock()
        while True:
            await self._feeds.hungry.wait()
            try:
                self._polling = asyncio.create_task(self._poll(wait_seconds))
                messages = await asyncio.shield(self._polling)
                async with self._handling:
                    self._polling = None
                    for message in messages:
                        await self._handle_message(info, ShardMessage(self._context, message))
                num_failures = 0
                if not messages and self._is_idle(limit) and not await self._stays_ready():
                    logger.info("idle", seconds=limit)
                    return
            except HandlerError as exc:  # one message's failure must not stop the next
                self._polling = None
                num_failures += 1
                if num_failures > _MAX_FAILED_POLLS and self._is_idle(limit):
                    raise QueueUnreachable(f"the queue is unreachable: {exc}") from exc
                logger.warning("receiving failed", reason=str(exc))
                delay_seconds = exponential_delay(num_failures - 1, 1.0, most=MAX_BACKOFF_SECONDS)
                await asyncio.sleep(delay_seconds)

    def _is_idle(self, limit: float | None) -> bool:
        """Return whether the worker has been idle for its limit, if it has one."""
        is_due = limit is not None and self._context.clock() >= self._busy_at + limit
        return is_due and not self._runs

    async def _stays_ready(self) -> bool:
        """Return whether this idle worker is one of those that stay at this hour.

        The reaper replaces missing ones: it starts more if fewer than these run.
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

    async def _handle_message(self, info: EngineInfo, message: ShardMessage) -> None:
        """Handle one message: claim its shard and start to run it."""
        for run in self._runs:
            if run.message.target == message.target and not run.is_over:
                await run.message.take_over(message)
                return
        owner = f"{self._id}-{next(self._num_claims)}"
        is_prefetch = self._prefetch.is_ahead
        claim = await claim_shard(self._context, message, owner=owner, is_prefetch=is_prefetch)
        if claim is None:
            return
        order = self._prefetch.order_of(claim.batch.id)
        run = ShardRun(claim, self._context, order, self._feeds.admit, self._feeds.check_machine)
        self._runs.append(run)
        self._heartbeat.beat()
        working = asyncio.create_task(run.work())
        self._working.add(working)
        working.add_done_callback(lambda task: self._done(run, task))
        self._feeds.admit()
        await note_engine(self._context, claim.batch, info)

    def _done(self, run: ShardRun, working: asyncio.Task[None]) -> None:
        self._working.discard(working)
        self._runs.remove(run)
        heir = next((each for each in self._runs if each.batch.id == run.batch.id), None)
        if heir is None:
            self._context.keep_pace(run.batch.id, run.meter.pace)
        else:
            heir.meter.pace.merge(run.meter.pace)
            self._heartbeat.beat()  # otherwise its batch seems stalled until the next beat
        self._busy_at = self._context.clock()
        self._feeds.admit()

    async def _stop_receiving(self) -> None:
        """Stop receiving; a message that is being handled is finished.

        A long poll goes on in SQS after its caller has left, and would swallow the next message:
        it is awaited, and its messages are sent again.
        """
        receiving, self._receiving = self._receiving, None
        if receiving is None:
            return
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
            logger.warning("message left to its timeout", reason=str(exc))

    async def _end_runs(self) -> None:
        """Release every unfinished shard, with the lines of dead engines as suspects."""
        dead = [feed for feed in self._feeds.live if feed.death is not None]
        for run in self._runs:
            if dead:
                # If the machine is broken, nothing has changed.
                verdict = None if self._feeds.is_broken else _judge(run, dead)
                run.end(EarlyEnd("the engine died", is_resent=True, verdict=verdict))
            else:
                run.end(EarlyEnd("the worker stops", is_resent=True))
        if self._working:
            _, late = await asyncio.wait(self._working, timeout=_HAND_OVER_SECONDS)
            await _cancel(*late)

    def _record_death(self, feed: Feed) -> None:
        """Record the death of an engine; raises an unexpected error of its feed.

        Raises MachineBroken if no line was the cause.
        """
        reason = feed.died.result()
        logger.error("engine died", reason=reason, num_answered=feed.num_answered)
        self._context.emit({Metric.ENGINE_DEATHS: 1})
        if feed.is_broken:
            raise MachineBroken(_BROKEN)


def _judge(run: ShardRun, dead: Sequence[Feed]) -> Verdict:
    """Return the verdict on a shard's lines that were in dead engines."""
    lost = {number for feed in dead for number in feed.load.lines.get(run, ())}
    return run.judge(lost, "; ".join(str(feed.death) for feed in dead))


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Wait until one task is done; raises its exception."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, with or without an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
