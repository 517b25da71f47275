"""Deaths of engines behind a server: who is suspected, and what it costs the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
from pydantic_core import to_json

from tests.engine_process.fake_clients import Life, Machine, install
from tidemill.engine_process.deaths import MAX_MACHINE_FAILURES
from tidemill.engine_process.replica_pool import ReplicaPool
from tidemill.engine_process.served_replicas import ServedReplicas
from tidemill.protocol.contract import EngineError, Reply

NAMES = [f"r{number}" for number in range(60)]


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, engines: int
) -> Iterator[ServedReplicas]:
    """Serve with a number of engines on a machine."""
    install(monkeypatch, machine)
    served = ServedReplicas([[str(number)] for number in range(engines)], log=print)
    try:
        yield served
    finally:
        served.close()


async def ask(served: ServedReplicas, name: str, *, is_online: bool) -> Reply:
    """Return the reply to an interactive request, or to a line of a batch."""
    respond = served.answer if is_online else served.respond
    async with asyncio.timeout(120):
        reply = await respond("/v1/x", {"custom_id": name, "prompt": name}, "req_1", 1)
    assert isinstance(reply, Reply)
    return reply


@pytest.mark.parametrize("seed", range(20))
async def test_each_killer_gets_an_error_and_every_other_request_its_reply(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Deaths are bounded by the halvings of the requests that an engine has, for each killer."""
    random = Random(seed)
    killers = frozenset(random.sample(NAMES, random.randint(0, 4)))
    machine = Machine(random.choice((2, 8, 64)), killers=killers, random=random)
    with serving(monkeypatch, machine, random.randint(1, 4)) as served:
        requests = [ask(served, name, is_online=random.random() < 0.5) for name in NAMES]
        replies = dict(zip(NAMES, await asyncio.gather(*requests), strict=True))
    failed = {name for name, reply in replies.items() if reply.status_code != 200}
    assert failed == killers
    assert {replies[name].body["error"]["code"] for name in failed} <= {"engine_died"}
    assert machine.num_deaths <= len(killers) * (3 + math.ceil(math.log2(len(NAMES))))


@pytest.mark.parametrize("is_online", [True, False])
async def test_a_harmless_request_next_to_two_killers_has_its_reply(
    monkeypatch: pytest.MonkeyPatch, *, is_online: bool
) -> None:
    """Online and batch requests behave the same."""
    machine = Machine(slots=3, killers=frozenset({"r0", "r2"}))
    with serving(monkeypatch, machine, 1) as served:
        requests = (ask(served, name, is_online=is_online) for name in NAMES[:3])
        statuses = [reply.status_code for reply in await asyncio.gather(*requests)]
    assert statuses == [500, 200, 500]


async def test_an_interactive_request_waits_for_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines wait until an engine has room for them, interactive requests go to it at once."""
    machine, began = Machine(slots=1, turns=10**6), asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(life: Life, _name: str) -> None:
        loop.call_soon_threadsafe(began.set)
        assert len(life.has) <= 7

    machine.on_start = note
    with serving(monkeypatch, machine, 1) as served:
        lines = [asyncio.create_task(ask(served, name, is_online=False)) for name in NAMES]
        await began.wait()
        request = asyncio.create_task(ask(served, "urgent", is_online=True))
        async with asyncio.timeout(120):
            while "urgent" not in machine.lives[0].has:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0.01)
        assert len(machine.lives[0].has) <= 7
        for one in (*lines, request):
            one.cancel()
        await asyncio.gather(*lines, request, return_exceptions=True)


async def test_a_server_without_engines_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose engine has ended for good gets the same error as all others."""
    machine = Machine(killers=frozenset({"r0"}))

    def lose(life: Life, _name: str) -> None:
        machine.lost.add(life.engine)

    machine.on_start = lose
    with serving(monkeypatch, machine, 1) as served:
        with pytest.raises(EngineError, match="no engine is left"):
            await ask(served, "r0", is_online=True)
        with pytest.raises(EngineError, match="no engine is left"):
            served.stats()


async def test_a_request_that_leaves_before_the_verdict_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client is gone, so it is not tried, and suspects of a later death run again."""
    machine = Machine(slots=4, turns=50)
    install(monkeypatch, machine)
    pool, may_end = ReplicaPool([["1"], ["2"]], log=print), asyncio.Event()

    async def fetch(client: Any, name: str) -> Any:
        return await client.fetch_row(1, 0, to_json({"custom_id": name}))

    async def fetch_late(client: Any, name: str) -> Any:
        try:
            return await fetch(client, name)
        except BaseException:
            await may_end.wait()  # as one that waits for a pipe with room
            raise

    async def turns(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    async with asyncio.timeout(60), pool.started():
        leaving = asyncio.create_task(pool.run(partial(fetch, name="a"), home=0))
        late = asyncio.create_task(pool.run(partial(fetch_late, name="b"), home=0))
        await turns(4)
        machine.kill(1)
        await turns(3)
        leaving.cancel()
        await turns(1)
        may_end.set()
        assert await late
        machine.turns = 10**6
        last = asyncio.create_task(pool.run(partial(fetch, name="c"), home=0))
        await turns(30)
        [busy] = [number for number, one in enumerate(pool._replicas.all, 1) if one.sent]
        machine.turns = 3
        machine.kill(busy)
        assert await last


async def test_a_broken_machine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth death that an engine reports as its machine's fault is the last one."""
    machine = Machine(killers=frozenset({"r0"}), broken={0})
    with (
        serving(monkeypatch, machine, 1) as served,
        pytest.raises(EngineError, match="engines keep exiting"),
    ):
        await ask(served, "r0", is_online=True)
    assert machine.num_deaths == MAX_MACHINE_FAILURES
