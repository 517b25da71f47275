"""Engine crashes in a data-parallel run: which lines are suspected, and the cost for others."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection, Sequence
from random import Random

import pytest

from tests.engine_process.fake_clients import Life, Machine, install
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.run_line import LineResult
from tidemill.engine_process.frames import FrameError
from tidemill.offline.files.input_file import PlacedLine
from tidemill.offline.run.replicas import EngineReplicas
from tidemill.protocol.contract import EngineError

NAMES = [f"c{number}" for number in range(200)]


def lines_of(names: Sequence[str]) -> list[PlacedLine]:
    """Return a line for each custom id."""
    return [
        PlacedLine(
            place,
            RawLine(
                place + 1, json.dumps({"custom_id": name, "url": "/v1/x", "body": {}}).encode()
            ),
        )
        for place, name in enumerate(names)
    ]


class Run:
    """Run of lines on a machine with a number of engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machine: Machine, engines: int) -> None:
        install(monkeypatch, machine)
        self.machine = machine
        commands = [[str(number)] for number in range(engines)]
        self.replicas = EngineReplicas(commands, created=1, home=lambda place: place // 4)

    async def rows(self, names: Sequence[str]) -> list[LineResult]:
        """Return the rows of lines that are all sent at once."""
        async with self.replicas.started(), asyncio.timeout(120):
            return await asyncio.gather(*map(self.replicas.run_line, lines_of(names)))


async def until(condition: Callable[[], object]) -> None:
    """Wait for a state."""
    while not condition():  # noqa: ASYNC110 - turns of the loop are what passes
        await asyncio.sleep(0)


def ids_of(rows: Sequence[LineResult]) -> list[str]:
    """Return the custom ids of rows."""
    return [json.loads(row.row)["custom_id"] for row in rows]


def failed_of(rows: Sequence[LineResult]) -> list[str]:
    """Return the custom ids of error rows, which all say that the line has ended engines."""
    failed = [json.loads(row.row) for row in rows if not row.is_success]
    assert all(row["error"]["code"] == "engine_died" for row in failed)
    return [row["custom_id"] for row in failed]


@pytest.mark.parametrize("seed", range(40))
async def test_each_killer_gets_an_error_row_and_every_other_line_its_own(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Deaths are bounded by the halvings of the lines that an engine has, for each killer."""
    random = Random(seed)
    names = NAMES[: random.randint(1, len(NAMES))]
    killers = random.sample(names, min(len(names), random.randint(0, 5)))
    slots, engines = random.choice((1, 4, 16)), random.randint(1, 4)
    endpoints = random.choice(((), ("/v1/completions",)))
    machine = Machine(slots, killers=frozenset(killers), random=random, endpoints=endpoints)
    rows = await Run(monkeypatch, machine, engines).rows(names)
    assert ids_of(rows) == names
    assert sorted(failed_of(rows)) == sorted(killers)
    most_at_once = min(len(names), 6 * slots)
    assert machine.num_deaths <= len(killers) * (3 + math.ceil(math.log2(most_at_once)))


def began(life: Life, names: Collection[str]) -> list[frozenset[str]]:
    """Return the company in which some lines began to run in an engine."""
    pairs = zip(life.began, life.company, strict=True)
    return [company for name, company in pairs if name in names]


@pytest.mark.parametrize("seed", range(10))
async def test_a_chance_death_costs_no_time_in_which_lines_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The lines of the dead engine run once more, all at once and apart from others."""
    random = Random(seed)
    machine = Machine(slots=8, turns=9, random=random)
    run, due = Run(monkeypatch, machine, engines=2), random.randint(20, 120)

    def kill_when_due(_life: Life, _name: str) -> None:
        if sum(len(life.began) for life in machine.lives) == due:
            machine.kill(0)

    machine.on_start = kill_when_due
    rows = await run.rows(NAMES)
    assert (failed_of(rows), machine.num_deaths) == ([], 1)
    dead = machine.lives[0]
    assert 8 <= len(dead.lost) <= 6 * machine.slots
    again = [company for life in machine.lives[1:] for company in began(life, dead.lost)]
    assert len(again) == len(dead.lost)
    assert all(company <= dead.lost for company in again)
    assert max(map(len, again)) == machine.slots


async def test_lines_that_an_engine_gives_up_run_in_idle_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not return to the engine of their prefix, and none begins twice."""
    names, machine = NAMES[:16], Machine(slots=8, turns=10**6)
    run = Run(monkeypatch, machine, engines=2)
    run.replicas._home = lambda place: int(place >= 4)
    async with run.replicas.started(), asyncio.timeout(20):
        rows = asyncio.gather(*map(run.replicas.run_line, lines_of(names)))
        await until(lambda: [len(life.has) for life in machine.lives] == [4, 12])
        run.replicas._balance()
        await until(lambda: [len(life.running) for life in machine.lives] == [8, 8])
        assert sorted(name for life in machine.lives for name in life.began) == sorted(names)
        rows.cancel()


async def test_other_lines_run_while_suspects_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial takes one engine and runs without other lines."""
    names, machine = NAMES[:60], Machine(slots=2, killers=frozenset({"c1"}), turns=5)
    suspects, num_other_lines = set[str](), 0

    def note(life: Life, name: str) -> None:
        nonlocal num_other_lines
        suspects.update(*(one.lost for one in machine.lives))
        is_trial = any(one.running and one.running <= suspects for one in machine.lives)
        if name in suspects:
            assert life.running <= suspects
        else:
            num_other_lines += is_trial

    machine.on_start = note
    rows = await Run(monkeypatch, machine, engines=2).rows(names)
    assert (failed_of(rows), ids_of(rows)) == (["c1"], names)
    assert num_other_lines > 4


async def test_a_harmless_line_next_to_two_killers_has_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in each engine that dies, and is tried without either of them at last."""
    machine = Machine(slots=3, killers=frozenset({"c0", "c2"}))
    rows = await Run(monkeypatch, machine, engines=1).rows(NAMES[:3])
    assert (failed_of(rows), rows[1].is_success) == (["c0", "c2"], True)
    assert sum("c1" in life.lost for life in machine.lives) >= 2


def kill_at(machine: Machine, name: str, **faults: set[int]) -> list[int]:
    """Kill the engines that begin a line for the first and the second time.

    The second one gets the faults then. The engines are in the list that is returned.
    """
    killed: list[int] = []

    def kill(life: Life, began: str) -> None:
        if began == name and len(killed) < 2:
            killed.append(life.engine)
            if len(killed) == 2:
                for engines in faults.values():
                    engines.add(life.engine)
            machine.kill(life.engine)

    machine.on_start = kill
    return killed


@pytest.mark.parametrize("fault", ["ill", "broken", "lost"])
async def test_a_broken_machine_blames_no_line(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A line that was alone at a second death is tried once more in another engine.

    The engine dies of a known line when it is started again, reports a fault of its machine, or
    cannot be started.
    """
    machine = Machine()
    killed = kill_at(machine, "c0", fault=getattr(machine, fault))
    rows = await Run(monkeypatch, machine, engines=2).rows(["c0"])
    assert len(killed) == 2
    assert (failed_of(rows), ids_of(rows)) == ([], ["c0"])


async def test_a_line_alone_at_two_deaths_has_an_error_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines were well when they were started again."""
    machine = Machine()
    killed = kill_at(machine, "c0")
    rows = await Run(monkeypatch, machine, engines=2).rows(["c0"])
    assert (len(killed), failed_of(rows)) == (2, ["c0"])


async def test_no_row_is_written_where_the_last_engine_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends instead, and can be resumed."""
    machine = Machine()
    kill_at(machine, "c0", fault=machine.ill)
    with pytest.raises(
        EngineError, match="no engine is left: it exited while running the canary line"
    ):
        await Run(monkeypatch, machine, engines=1).rows(["c0"])


async def test_a_file_of_killers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that end at each line, though they are well, end at the other lines, too."""
    machine = Machine(killers=frozenset(NAMES))
    with pytest.raises(EngineError, match="each of the last requests"):
        await Run(monkeypatch, machine, engines=2).rows(NAMES)


async def test_an_engine_that_dies_without_lines_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next line goes to it or to another engine and is not a suspect."""
    machine = Machine()
    run = Run(monkeypatch, machine, engines=1)
    async with run.replicas.started():
        machine.kill(0)
        row = await run.replicas.run_line(*lines_of(["c0"]))
    assert (row.is_success, len(machine.lives)) == (True, 2)
    assert [life.began for life in machine.lives] == [[], ["c0"]]


async def test_suspects_that_are_left_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops cancels its lines: those that wait for a trial, and those on trial."""
    machine = Machine(slots=4, turns=10**6)
    run = Run(monkeypatch, machine, engines=1)
    async with run.replicas.started(), asyncio.timeout(120):
        running = [asyncio.create_task(run.replicas.run_line(one)) for one in lines_of(NAMES[:8])]
        await until(lambda: len(machine.lives[0].running) == 4)
        machine.kill(0)
        await until(lambda: len(machine.lives) == 2 and machine.lives[1].running)
        machine.turns = 1
        late = asyncio.create_task(run.replicas.run_line(*lines_of(["c9"])))
        await asyncio.sleep(0)
        assert not machine.lives[1].running & {"c9"}
        for one in running:
            one.cancel()
        assert (await late).is_success
    assert machine.num_deaths == 1


@pytest.mark.parametrize(
    ("data", "custom_id"),
    [(b'{"custom_id": "a", "url": "/v1/x", "body": {}}', "a"), (b'{"custom_id": "b"}', "b")],
)
async def test_a_line_that_is_too_long_for_the_wire_has_its_custom_id(
    monkeypatch: pytest.MonkeyPatch, data: bytes, custom_id: str
) -> None:
    """Its error row has it, also where the line is not a request."""

    async def refuse(*_: object) -> None:
        raise FrameError("a frame of 9 bytes is too long")

    monkeypatch.setattr("tests.engine_process.fake_clients.FakeClient.fetch_row", refuse)
    run = Run(monkeypatch, Machine(), engines=1)
    async with run.replicas.started():
        row = await run.replicas.run_line(PlacedLine(0, RawLine(1, data)))
    shown = json.loads(row.row)
    assert (shown["custom_id"], shown["id"]) == (custom_id, f"batch_req_{RawLine(1, data).digest}")
