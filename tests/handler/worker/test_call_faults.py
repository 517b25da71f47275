"""Calls on the way of a line through a worker fail: no shard is committed with fewer rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.handler.worker.rig import Rig, until
from tidemill.batch.parts import PartIndex
from tidemill.handler.worker.feed import Feed, Feeds
from tidemill.handler.worker.shard.pending_lines import PendingLines
from tidemill.handler.worker.shard.rows import Unflushed
from tidemill.handler.worker.shard.shard_run import ShardRun
from tidemill.handler.worker.shard.shard_span import ShardSpan

CALLS: list[tuple[Any, str]] = [
    (ShardRun, "_add"),
    (Feed, "_done"),
    *((ShardRun, name) for name in ("finish", "_flush", "_commit", "_open", "_collect")),
    *((Feed, name) for name in ("_run_line", "_send", "_go_on_after", "admit", "_next_line")),
    *((PendingLines, name) for name in ("pop", "finish")),
    *((Unflushed, name) for name in ("add", "drop", "due_in")),
    *((PartIndex, name) for name in ("add", "seal", "progress")),
    *((Feeds, "admit"), (Feeds, "update_hunger"), (ShardSpan, "add"), (ShardSpan, "end")),
]
IDS = ["c1", "c2", "c3", "c4"]


def failing_once(original: Callable[..., Any], call: int, *, at_end: bool) -> Callable[..., Any]:
    """Return a method of which one call raises, at its start or after it has done its work."""
    numbers = iter(range(10**9))

    def method(*args: Any, **kwargs: Any) -> Any:
        is_faulty = next(numbers) == call
        if is_faulty and not at_end:
            raise MemoryError
        result = original(*args, **kwargs)
        if not asyncio.iscoroutine(result):
            if is_faulty:
                raise MemoryError
            return result
        return then_fail(result) if is_faulty else result

    async def then_fail(result: Any) -> None:
        await result
        raise MemoryError

    return method


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("call", [3, 0])
@pytest.mark.parametrize("method", CALLS, ids=lambda method: method[1])
async def test_a_call_that_fails_costs_no_row(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, method: tuple[Any, str], call: int, *, at_end: bool
) -> None:
    """The worker goes on or ends, and its shard is whole or is given back for the next worker."""
    owner, name = method
    work = rig.batch(*[{}] * len(IDS))
    with monkeypatch.context() as failing, suppress(MemoryError):
        failing.setattr(owner, name, failing_once(getattr(owner, name), call, at_end=at_end))
        async with rig.worker(flush_seconds=0.05) as running:
            await until(lambda: running.task.done() or work.is_done)
    if not work.is_done:
        work.ring()
        async with rig.worker():
            await until(lambda: work.is_done)
    assert work.ids() == IDS
