"""The loop of a worker: an engine, the shards that keep it full, and the end of both."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from uuid import uuid4

from engine.contract import EngineInfo as LoadedEngine
from engine.contract import EngineStats
from handler.aws.queues import Message
from handler.batch.model import EngineInfo
from handler.errors import AwsError, HandlerError
from handler.log import logger
from handler.metrics import Metric
from handler.worker.feed import Engine, Feed
from handler.worker.gpu_time import GpuTime
from handler.worker.heartbeat import Heartbeat
from handler.worker.link import EngineDied, EngineFailed
from handler.worker.proof import Canary, known_line
from handler.worker.shard.agenda import Verdict
from handler.worker.shard.claim import claim_shard, note_engine
from handler.worker.shard.doorbell import Doorbell
from handler.worker.shard.rows import compact
from handler.worker.shard.shard_run import Ending, ShardRun
from handler.worker.site.site import Site

# After the grace for requests: to write what is finished and give the shards back.
_HAND_OVER_SECONDS = 20.0
_TAKING_SECONDS = 5.0
_LAST_SECONDS = 5.0
_MAX_BACKOFF_SECONDS = 30.0
# A minute of looks that failed: who has no work then and may end costs money for nothing.
_MAX_FAILED_LOOKS = 6
# Halving the suspects of 4,096 lines down to one takes twelve deaths; more than that in a row and
# not one row between them means that the engine, or its device, is what is broken.
MAX_BARREN_LIVES = 16
_BROKEN = "this machine cannot run a known line"
# No request can be blamed for a death while the model loads, and a load may take minutes.
MAX_FAILED_STARTS = 5


class MachineBroken(HandlerError):
    """An engine cannot run a line that any can: what other lines do here says nothing."""

    code = "machine_broken"


class NothingComes(HandlerError):
    """No work can be taken, and none is held: what waits is for a worker that can be reached."""

    code = "nothing_comes"


class Link(Engine, Protocol):
    """One life of an engine; `link.EngineLink` is one."""

    @property
    def stats(self) -> EngineStats:
        """Return what the engine last said of its work."""

    async def start(self) -> LoadedEngine:
        """Load the model; raises EngineFailed when that cannot be."""

    async def close(self) -> None:
        """End the process."""


class Worker:
    """Runs shards until it is stopped, idle for long enough, or has no engine."""

    def __init__(self, site: Site, make_link: Callable[[], Link]) -> None:
        self._site = site
        self._make_link = make_link
        self._runs: list[ShardRun] = []
        self._working: set[asyncio.Task[None]] = set()
        self._gpu_time = GpuTime(site, self._runs)
        self._heartbeat = Heartbeat(site, self._runs, self._gpu_time)
        self._stopped = asyncio.Event()
        self._taking = asyncio.Lock()
        self._polling: asyncio.Task[list[Message]] | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._busy_at = site.clock()
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._num_barren_lives = 0
        self._num_failed_starts = 0
        self._canary: Canary | None = None

    def stop(self) -> None:
        """Take no more work, finish or give back what there is, and return from `run`."""
        self._stopped.set()

    async def run(self) -> int:
        """Return the exit status: 0 when stopped or idle, 1 when it cannot go on."""
        beating = asyncio.create_task(self._heartbeat.beat_for_ever())
        try:
            while True:
                link = self._make_link()
                try:
                    has_died = await self._live(link, beating)
                except EngineFailed as exc:
                    if not await self._may_start_again(exc, beating):
                        return 1
                    has_died = True
                except (MachineBroken, NothingComes) as exc:
                    logger.error(str(exc))
                    return 1
                finally:
                    await link.close()
                if not has_died or self._stopped.is_set():
                    return 0
                if self._num_barren_lives >= MAX_BARREN_LIVES:
                    logger.error("engine dies of everything", num_lives=self._num_barren_lives)
                    return 1
        finally:
            await _cancel(beating)
            if self._returning:
                limit = self._site.config.wait_seconds + _TAKING_SECONDS
                _, late = await asyncio.wait(self._returning, timeout=limit)
                await _cancel(*late)
            self._site.tell(self._site.meter.take())
            await self._tell_last()

    async def _tell_last(self) -> None:
        """Tell what is left of the history, if that can be done quickly: it is for plots only."""
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                await self._site.tell_history()
        except (AwsError, TimeoutError) as exc:
            logger.warning("history not told", reason=repr(exc))

    async def _may_start_again(self, failure: EngineFailed, beating: asyncio.Task[None]) -> bool:
        """Wait until an engine that died while it loaded may try again; False when none may.

        One that says itself why it cannot be started would say the same again.
        """
        self._site.tell({Metric.ENGINE_DEATHS: 1})
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

    async def _live(self, link: Link, beating: asyncio.Task[None]) -> bool:
        """Work through one life of the engine; return whether it died."""
        stopped = asyncio.create_task(self._stopped.wait())
        starting = asyncio.create_task(link.start())
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
        if self._site.cold_start.reach("ready"):
            steps = engine.load_seconds.items()
            self._site.cold_start.note(**{f"engine_{step}_seconds": took for step, took in steps})
        return await self._serve(link, engine, beating)

    async def _serve(self, link: Link, engine: LoadedEngine, beating: asyncio.Task[None]) -> bool:
        config = self._site.config
        self._gpu_time.num_gpus = engine.num_gpus
        self._gpu_time.stats = lambda: link.stats
        feed = Feed(
            link,
            self._runs,
            self._gpu_time,
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
        return self._take_note_of(feed)

    def _canary_for(self, engine: LoadedEngine) -> Canary | None:
        """Return the canary of this worker, the same in all lives of its engine."""
        line = known_line(engine.endpoints)
        if self._canary is None and line is not None:
            self._canary = Canary(line)
        return self._canary

    async def _receive(self, feed: Feed, info: EngineInfo) -> None:
        """Take shards as the feed wants them; return when there was nothing to do for long.

        It never ends while it holds a shard, nor before a look at the queue that found it empty; a
        message that rings for nothing it could run is no work. Raises NothingComes where looks have
        failed for as long.
        """
        config, num_failures = self._site.config, 0
        limit = config.exit_when_idle_seconds
        wait_seconds = min(config.wait_seconds, max(1, math.ceil(limit or config.wait_seconds)))
        self._busy_at = self._site.clock()
        while True:
            await feed.hungry.wait()
            try:
                self._polling = asyncio.create_task(self._poll(wait_seconds))
                messages = await asyncio.shield(self._polling)
                async with self._taking:
                    self._polling = None
                    for message in messages:
                        await self._take(feed, info, Doorbell(self._site, message))
                num_failures = 0
                if not messages and self._is_idle(limit):
                    logger.info("idle", seconds=limit)
                    return
            except HandlerError as exc:  # one message's misfortune must not be the next one's
                self._polling = None
                num_failures += 1
                if num_failures > _MAX_FAILED_LOOKS and self._is_idle(limit):
                    raise NothingComes(f"no work can be taken: {exc}") from exc
                logger.warning("receiving failed", reason=str(exc))
                await asyncio.sleep(min(_MAX_BACKOFF_SECONDS, 2.0 ** (num_failures - 1)))

    def _is_idle(self, limit: float | None) -> bool:
        """Say whether there was nothing to do for as long as it may wait, where that is bounded."""
        is_due = limit is not None and self._site.clock() >= self._busy_at + limit
        return is_due and not self._runs

    async def _poll(self, wait_seconds: int) -> list[Message]:
        return await self._site.aws.run(
            self._site.queue.receive(
                wait_seconds=wait_seconds,
                visibility_seconds=self._site.config.visibility_seconds,
            )
        )

    async def _take(self, feed: Feed, info: EngineInfo, doorbell: Doorbell) -> None:
        """Answer one message: most often, begin to run its shard."""
        for run in self._runs:
            if run.doorbell.target == doorbell.target and not run.is_over:
                await run.doorbell.take_over(doorbell)
                return
        claim = await claim_shard(self._site, doorbell, owner=f"{self._name}-{uuid4().hex}")
        if claim is None:
            return
        run = ShardRun(claim, self._site, feed.admit, feed.prove)
        self._runs.append(run)
        self._heartbeat.beat()
        working = asyncio.create_task(run.work())
        self._working.add(working)
        working.add_done_callback(lambda task: self._done(feed, run, task))
        feed.admit()
        await note_engine(self._site, claim.batch, info)

    def _done(self, feed: Feed, run: ShardRun, working: asyncio.Task[None]) -> None:
        self._working.discard(working)
        self._runs.remove(run)
        heir = next((each for each in self._runs if each.batch.id == run.batch.id), None)
        if heir is None:
            self._site.leave_pace(run.batch.id, run.pace)
        else:
            heir.pace.go_on_from(run.pace)
            self._heartbeat.beat()  # else its batch seems to stand until the next one
        self._busy_at = self._site.clock()
        feed.admit()

    async def _stop_receiving(self, receiving: asyncio.Task[None]) -> None:
        """Take no further message; one that is being answered is answered.

        A call for messages goes on in the queue after its caller has left, and would swallow the
        next one: it is waited for, and what it gets is put back.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_TAKING_SECONDS), self._taking:
                receiving.cancel()
        await _cancel(receiving)
        polling, self._polling = self._polling, None
        if polling is not None:
            returning = asyncio.create_task(self._put_back(polling))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    async def _put_back(self, polling: asyncio.Task[list[Message]]) -> None:
        """Put fresh messages in the place of those that come too late to be answered."""
        try:
            for message in await polling:
                doorbell = Doorbell(self._site, message)
                if doorbell.target is not None:
                    await doorbell.ring_again()
        except AwsError as exc:  # they come again by themselves
            logger.warning("message left behind", reason=str(exc))

    async def _end_runs(self, feed: Feed) -> None:
        """Give every shard back that has lines left, with its suspects if the engine has died."""
        reason = feed.death
        for run in self._runs:
            if reason is None:
                run.end(Ending("the worker stops", is_rung=True))
            else:
                verdict = None if feed.is_broken else _judge(run, reason)
                run.end(Ending("the engine died", is_rung=True, verdict=verdict))
        if self._working:
            _, late = await asyncio.wait(self._working, timeout=_HAND_OVER_SECONDS)
            await _cancel(*late)

    def _take_note_of(self, feed: Feed) -> bool:
        """Return whether the engine has died; raises what no engine should have done.

        Raises MachineBroken where no line was the cause.
        """
        if not feed.died.done():
            return False
        reason = feed.died.result()
        logger.error("engine died", reason=reason, num_answered=feed.num_answered)
        self._site.tell({Metric.ENGINE_DEATHS: 1})
        if feed.is_broken:
            raise MachineBroken(_BROKEN)
        self._num_barren_lives = 0 if feed.num_answered else self._num_barren_lives + 1
        return True


def _judge(run: ShardRun, reason: str) -> Verdict:
    """Return what the engine's death says of a shard's lines, and log it."""
    verdict = run.agenda.judge() if run.is_open else Verdict(run.shard.suspects)
    suspects = [compact(group) for group in verdict.suspects]
    logger.error("engine died", reason=reason, suspects=suspects, **run.labels)
    for line in verdict.quarantined:
        logger.error("quarantined", line=line, **run.labels)
    return verdict


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; raises what a task has raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if isinstance(task, asyncio.Task):
            task.result()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
