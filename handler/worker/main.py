"""Run of a worker process: connects to AWS, starts the engines and the download of their weights.

The command line passes everything that depends on the engine or the local machine as values and
callables.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tidemill.engine_process.child import in_thread
from tidemill.engine_process.client import EngineClient
from tidemill.net.open_tracing import open_tracing
from tidemill.net.tracing import Tracing

from ..aws.aio import AioAws
from ..aws.bucket import Bucket
from ..aws.queues import Queue
from ..deployment import Deployment
from ..observability import logger
from ..settings import Settings
from .context.cold_start import ColdStart, process_age, read_task, task_steps
from .context.config import WorkerConfig
from .context.context import WorkerContext
from .kept_results import DigestAt, KeptResults, ThreadDrive
from .parity_results import ParityResults, ResultCache
from .worker import Worker

Folders: TypeAlias = Mapping[str, str]
"""Local folder of each weights URL."""

FetchWeights: TypeAlias = Callable[[AsyncExitStack, ColdStart], Folders]
OnSignal: TypeAlias = Callable[[Callable[[], object]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEngines:
    """Engines of a worker: one for each of `commands`, all with the same model.

    `served_names` begins with the model's names and ends with those of its adapters. An engine
    without progress for `stall_seconds` is ended. `fetch_weights` downloads weights, which stay in
    place while the stack is open; it is called in a thread, and is None if all weights are local.
    `open_parity_cache` opens the cache of parity results since a time (Unix seconds), and is None
    if results are not shared. `make_digest_at` returns the digest of everything that determines
    results, given a function that returns the folders of fetched weights.
    """

    commands: Sequence[Sequence[str]]
    served_names: Sequence[str]
    stall_seconds: float
    fetch_weights: FetchWeights | None
    open_parity_cache: Callable[[float], ResultCache] | None
    make_digest_at: Callable[[Callable[[], Folders]], DigestAt]


async def run_worker(
    settings: Settings,
    config: WorkerConfig,
    engines: WorkerEngines,
    *,
    beating: AbstractAsyncContextManager[None],
    on_signal: OnSignal,
) -> int:
    """Run shards until a signal or idleness, and return the exit status.

    `beating` is entered for the duration of the run. `on_signal` registers the function that a
    signal calls while it is entered.
    """
    age, machine_age = process_age()
    cold_start, began = ColdStart(age), time.time() - age
    cold_start.reach("process")
    cold_start.note(machine_age_seconds=round(machine_age, 3))
    folders: asyncio.Future[Folders] | None = None

    def make_client(command: Sequence[str]) -> EngineClient:
        return EngineClient(
            command,
            stall_seconds=engines.stall_seconds,
            start_seconds=config.start_seconds,
            folders=folders,
        )

    loop, fetch_weights = asyncio.get_running_loop(), engines.fetch_weights
    async with AsyncExitStack() as stack:
        aws = await stack.enter_async_context(AioAws())
        await stack.enter_async_context(beating)
        deployment = Deployment(settings)
        context = WorkerContext(
            aws,
            deployment,
            Queue(config.queue),
            config,
            cold_start=cold_start,
            parity_results=_parity_results(deployment.bucket, engines, began),
            kept_results=_kept_results(
                stack,
                ThreadDrive(aws),
                deployment.bucket,
                config,
                engines,
                folders=lambda: folders.result() if folders else {},
            ),
            tracing=_tracing(stack),
        )
        worker = Worker(context, *(partial(make_client, command) for command in engines.commands))
        with on_signal(lambda: loop.call_soon_threadsafe(worker.stop)):
            in_thread(lambda: cold_start.note(**task_steps(read_task(os.environ), began)))
            if fetch_weights is not None:  # in parallel with the engine's imports
                fetching = in_thread(partial(fetch_weights, stack, cold_start))
                folders = asyncio.ensure_future(_fetched(context, fetching))
                stack.callback(folders.cancel)
            return await worker.run()


def _parity_results(bucket: Bucket, engines: WorkerEngines, since: float) -> ParityResults | None:
    """Return the parity results that this machine shares; None if it shares none."""
    if engines.open_parity_cache is None:
        return None
    return ParityResults(bucket, engines.served_names[0], engines.open_parity_cache(since))


def _kept_results(
    stack: AsyncExitStack,
    drive: ThreadDrive,
    bucket: Bucket,
    config: WorkerConfig,
    engines: WorkerEngines,
    *,
    folders: Callable[[], Folders],
) -> KeptResults | None:
    """Return the results for later batches, closed with the stack; None without `--reuse`."""
    if not config.reuse:
        return None
    kept = KeptResults(
        drive,
        bucket,
        engines.served_names,
        engines.make_digest_at(folders),
        max_bytes=config.reuse_max_size,
        sampled=config.reuse_sampled,
    )
    # In a thread: a lookup may hold it, and wait for this loop.
    stack.push_async_callback(asyncio.to_thread, kept.close)
    return kept


def _tracing(stack: AsyncExitStack) -> Tracing | None:
    """Return the tracing that the environment configures, closed with the stack."""
    tracing = open_tracing(logger.warning)
    if tracing is not None:
        stack.push_async_callback(asyncio.to_thread, tracing.close)
    return tracing


async def _fetched(context: WorkerContext, fetching: Future[Folders]) -> Folders:
    """Return the folders of weights once other machines' parity results are copied, too."""
    _, folders = await asyncio.gather(context.read_parity_results(), asyncio.wrap_future(fetching))
    return folders
