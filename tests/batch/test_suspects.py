"""Suspects: groups, trials and verdicts, whatever kills the engines."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.suspects import Suspects, Verdict


def on_trial(suspects: Suspects) -> list[int]:
    """Return the next group, all of which is running from now on."""
    numbers = []
    while (number := suspects.pop()) is not None:
        numbers.append(number)
    return numbers


def test_an_added_group_waits_after_the_others() -> None:
    """An empty group is not added, and none is handed out while another group is on trial."""
    suspects = Suspects([(), (1, 2)])
    suspects.add(())
    suspects.add((5,))
    assert suspects.groups == ((1, 2), (5,))
    assert on_trial(suspects) == [1, 2]
    assert (suspects.has_waiting_group, suspects.num_running, suspects.num_waiting) == (False, 2, 1)
    assert [suspects.finish(number) for number in (1, 2, 2)] == [True, True, False]
    assert on_trial(suspects) == [5]


def test_a_dropped_request_leaves_its_group() -> None:
    """A group is dropped with its last request."""
    suspects = Suspects([(1, 2), (3,)])
    suspects.drop(1)
    suspects.drop(3)
    assert suspects.groups == ((2,),)


def test_a_trial_on_a_faulty_machine_changes_nothing() -> None:
    """The same group is tried again: it is neither halved nor quarantined."""
    suspects = Suspects([(1,), (2, 3)])
    assert on_trial(suspects) == [1]
    suspects.acquit()
    assert suspects.groups == ((1,), (2, 3))
    suspects.acquit()
    assert suspects.groups == ((1,), (2, 3))


def test_a_verdict_is_applied_as_it_was_returned() -> None:
    """Halves come first, a group of new suspects last."""
    suspects = Suspects([(1, 2, 3, 4, 5), (9,)])
    on_trial(suspects)
    suspects.finish(2)
    verdict = suspects.judge([1, 3, 4, 5, 8, 7])
    assert verdict == Verdict(((1, 3), (4, 5), (9,), (7, 8)))
    assert suspects.convict([1, 3, 4, 5, 8, 7]) == ()
    assert suspects.groups == verdict.suspects


class Machines:
    """Engines with random requests, which die of the deadly ones."""

    def __init__(self, deadly: set[int], count: int, room: int, random: Random) -> None:
        self.deadly = deadly
        self.room = room
        self.random = random
        self.engines: list[set[int]] = [set() for _ in range(count)]
        self.trial: set[int] | None = None
        self.suspects = Suspects()
        self.rows: set[int] = set()
        self.quarantined: list[int] = []
        self.num_deaths = 0

    def fill(self, waiting: list[int]) -> None:
        """Give a group of suspects an empty engine, and other requests to the others."""
        for engine in self.engines:
            if not engine and self.suspects.has_waiting_group:
                self.trial = engine
                engine.update(on_trial(self.suspects))
            elif engine is not self.trial:
                while waiting and len(engine) < self.room:
                    engine.add(waiting.pop())

    def step(self, *, may_kill: bool) -> None:
        """End one request, or an engine, by the request or by chance."""
        engine = self.random.choice([engine for engine in self.engines if engine])
        number = self.random.choice(sorted(engine))
        is_chance = may_kill and (engine is not self.trial or len(engine) > 1)
        if number in self.deadly or is_chance:
            self.num_deaths += 1
            verdict = self.suspects.judge(engine)
            quarantined = self.suspects.convict(engine)
            assert verdict == Verdict(self.suspects.groups, quarantined)
            self.quarantined += quarantined
            engine.clear()
        else:
            self.rows.add(number)
            engine.discard(number)
            self.suspects.finish(number)
        if not self.suspects.is_on_trial:
            self.trial = None


@given(
    num_requests=st.integers(1, 60),
    deadly=st.sets(st.integers(0, 59), max_size=5),
    num_engines=st.integers(1, 4),
    room=st.integers(1, 32),
    chances=st.integers(0, 2),
    random=st.randoms(use_true_random=False),
)
def test_exactly_the_deadly_requests_are_quarantined(
    *,
    num_requests: int,
    deadly: set[int],
    num_engines: int,
    room: int,
    chances: int,
    random: Random,
) -> None:
    """Each deadly request is quarantined once, and every other request gets its row.

    A deadly request costs one death with other requests, one for each halving, and one alone. An
    engine that dies by chance costs one death, and at most the halvings of its group.
    """
    deadly = {number for number in deadly if number < num_requests}
    machines = Machines(deadly, num_engines, room, random)
    waiting = list(range(num_requests))
    random.shuffle(waiting)
    left = chances
    while len(machines.rows) + len(machines.quarantined) < num_requests:
        machines.fill(waiting)
        is_chance = left > 0 and random.random() < 0.1
        before = machines.num_deaths
        machines.step(may_kill=is_chance)
        left -= is_chance and machines.num_deaths > before
    assert machines.rows == set(range(num_requests)) - deadly
    assert sorted(machines.quarantined) == sorted(deadly)
    per_killer = 3 + math.ceil(math.log2(room))
    assert machines.num_deaths <= chances + len(deadly) * per_killer
