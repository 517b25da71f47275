"""The world of `bench.fleet_week`: files, machines, releases and a person, on one clock. No AWS."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Protocol

from handler.batch.fleet import EndKind

DAY, HOUR, MINUTE = 86_400, 3600, 60
_TICK = 10
_SAMPLE_SECONDS = 600
_BAD = "bad"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the weeks are like. Hours count from Monday, midnight."""

    days: int = 7
    drops_a_day: float = (
        25.0  # of median_rows and, by the same spread, some of a hundred times as many
    )
    median_rows: int = 20_000
    spread: float = 1.8
    nightly_rows: int = 2_000_000  # one more, at 22 h
    rows_per_second: float = 50.0
    shard_rows: int = 4096
    max_workers: int = 20
    window_hours: int = 24
    target_seconds: int = 3600
    machine_seconds: int = 40  # until it is paid for
    start_seconds: int = 300  # then, until its first row, in the mean
    spot_hours: float = 12.0  # a machine is taken after, in the mean
    idle_seconds: int = 300  # after which a worker exits
    num_droughts: int = 3  # of one to four hours each, in which no machine is had
    num_releases: int = 3  # in working hours, and
    num_bad_releases: int = 1  # whose workers die when they have loaded
    mend_hours: float = 1.0  # of a person, from 8 to 18 h, once told


@dataclass(eq=False, slots=True)
class Drop:
    """One file: rows that nobody runs, in shards, and those of shards that are run."""

    arrived_at: int
    num_rows: int
    waiting: list[float]
    num_running: int = 0
    rows_left: float = 0.0
    finished_at: int | None = None
    num_expired: float = 0.0


@dataclass(eq=False, slots=True)
class Machine:
    """One worker and its machine, from being asked for to its end."""

    id: str
    release: str
    asked_at: int
    paid_from: int | None = None
    ready_at: int = 0
    taken_at: int = 0
    stops_at: int | None = None
    drop: Drop | None = None
    rows: float = 0.0
    idle_since: int = 0
    busy_seconds: float = 0.0

    def is_ready(self, now: int) -> bool:
        """Say whether it has loaded its model."""
        return self.paid_from is not None and now >= self.ready_at


class Policy(Protocol):
    """Who decides how many workers there are."""

    def arrived(self, site: Site, drop: Drop) -> None:
        """Take note of a file whose shards wait."""

    def look(self, site: Site) -> None:
        """Do what is done every minute."""

    def ended(self, site: Site, machine: Machine, kind: EndKind) -> None:
        """Take note of the end of a worker."""

    def exits_idle(self) -> bool:
        """Say whether workers end by themselves."""


@dataclass(slots=True)
class Week:
    """What came of one: GPU hours by what they were for, files, and samples for a plot."""

    hours: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("work", "start", "idle", "crash"), 0.0)
    )
    num_starts: int = 0
    drops: list[Drop] = field(default_factory=list)
    samples: list[tuple[float, int, float]] = field(default_factory=list)

    def delays(self) -> list[tuple[float, float]]:
        """Return the hour in which each file came and the minutes that it took, or its window."""
        ends = [(drop.arrived_at, drop.finished_at or drop.arrived_at + DAY) for drop in self.drops]
        return [(at / HOUR, (end - at) / 60) for at, end in ends]


class Site:
    """The world: one clock, files, machines, releases, and a person who mends the bad one."""

    def __init__(self, scenario: Scenario, policy: Policy, seed: int) -> None:
        self.scenario, self.policy = scenario, policy
        self.now = 0
        self.machines: list[Machine] = []
        self.open: list[Drop] = []
        self.release, self.is_bad = "r0", False
        self.week = Week()
        self._luck = random.Random(seed)
        self._arrivals = drops_of(scenario, random.Random(seed + 1))
        self._droughts = droughts_of(scenario, random.Random(seed + 2))
        self._releases = releases_of(scenario, random.Random(seed + 3))
        self._mended_at: int | None = None

    def run(self) -> Week:
        """Go through the week."""
        end = self.scenario.days * DAY
        while self.now < end + DAY:
            self._deploy()
            while self._arrivals and self._arrivals[0].arrived_at <= self.now:
                drop = self._arrivals.pop(0)
                self.open.append(drop)
                self.week.drops.append(drop)
                self.policy.arrived(self, drop)
            if self.now % MINUTE == 0:
                self.policy.look(self)
            for machine in list(self.machines):
                self._step(machine)
            self._close()
            if self.now % _SAMPLE_SECONDS == 0:
                self._sample()
            if self.now >= end and not (self.open or self.machines):
                break
            self.now += _TICK
        for machine in list(self.machines):
            self._end(machine, EndKind.GOOD)
        return self.week

    def is_drought(self) -> bool:
        """Say whether no machine can be had."""
        return any(begin <= self.now < end for begin, end in self._droughts)

    def start(self) -> Machine:
        """Ask for a worker of today's release."""
        self.week.num_starts += 1
        machine = Machine(f"w{self.week.num_starts}", self.release, self.now)
        self.machines.append(machine)
        return machine

    def stop(self, machine: Machine) -> None:
        """Tell a worker to hand over and end."""
        if machine.stops_at is None:
            machine.stops_at = self.now + 30

    def alarm(self) -> None:
        """Tell the person, who mends it in working hours."""
        if self.is_bad and self._mended_at is None:
            hour = self.now / HOUR % 24
            wait = 0.0 if 8 <= hour < 18 else (8 - hour) % 24
            self._mended_at = self.now + int((wait + self.scenario.mend_hours) * HOUR)

    def _deploy(self) -> None:
        if self._mended_at is not None and self.now >= self._mended_at:
            self.release, self.is_bad, self._mended_at = f"mended at {self.now}", False, None
        while self._releases and self._releases[0][0] <= self.now:
            at, is_bad = self._releases.pop(0)
            if not self.is_bad:  # nobody deploys what is new over what does not run
                self.release, self.is_bad = f"{_BAD if is_bad else 'r'}{at}", is_bad

    def _step(self, machine: Machine) -> None:
        if machine.paid_from is None:
            is_had = self.now >= machine.asked_at + self.scenario.machine_seconds
            if machine.stops_at is not None:
                self._end(machine, EndKind.GOOD)
            elif is_had and not self.is_drought():
                machine.paid_from = self.now
                took = self._luck.lognormvariate(math.log(self.scenario.start_seconds), 0.25)
                machine.ready_at = machine.idle_since = self.now + int(took)
                taken = self._luck.expovariate(1 / (self.scenario.spot_hours * HOUR))
                machine.taken_at = self.now + int(taken)
        elif self.now >= machine.taken_at:
            self._end(machine, EndKind.TAKEN)
        elif machine.stops_at is not None and self.now >= machine.stops_at:
            self._end(machine, EndKind.GOOD)
        elif machine.is_ready(self.now):
            if machine.release.startswith(_BAD):
                self._end(machine, EndKind.BAD)
            elif machine.stops_at is None:
                self._work(machine)

    def _work(self, machine: Machine) -> None:
        room = self.scenario.rows_per_second * _TICK
        while room > 0 and (machine.drop is not None or self._take(machine)):
            drop = machine.drop
            assert drop is not None
            done = min(room, machine.rows)
            machine.rows -= done
            drop.rows_left -= done
            room -= done
            machine.busy_seconds += done / self.scenario.rows_per_second
            if machine.rows <= 0:
                drop.num_running -= 1
                machine.drop = None
        if machine.drop is not None or room < self.scenario.rows_per_second * _TICK:
            machine.idle_since = self.now
        elif (
            self.policy.exits_idle() and self.now - machine.idle_since >= self.scenario.idle_seconds
        ):
            self._end(machine, EndKind.GOOD)

    def _take(self, machine: Machine) -> bool:
        """Give a worker the next shard, of the file that has the fewest workers."""
        drop = min(
            (drop for drop in self.open if drop.waiting),
            key=lambda drop: (drop.num_running, drop.arrived_at),
            default=None,
        )
        if drop is not None:
            machine.drop, machine.rows = drop, drop.waiting.pop()
            drop.num_running += 1
        return drop is not None

    def _end(self, machine: Machine, kind: EndKind) -> None:
        self.machines.remove(machine)
        if machine.drop is not None:  # what it has not done, others do
            machine.drop.waiting.append(machine.rows)
            machine.drop.num_running -= 1
        if machine.paid_from is not None:
            self._pay(machine, kind)
        self.policy.ended(self, machine, kind)

    def _pay(self, machine: Machine, kind: EndKind) -> None:
        hours, paid_from = self.week.hours, machine.paid_from or 0
        if kind is EndKind.BAD:
            hours["crash"] += (self.now - paid_from) / HOUR
            return
        start = min(self.now, machine.ready_at) - paid_from
        hours["start"] += start / HOUR
        hours["work"] += machine.busy_seconds / HOUR
        hours["idle"] += max(0.0, self.now - paid_from - start - machine.busy_seconds) / HOUR

    def _close(self) -> None:
        for drop in list(self.open):
            is_late = self.now >= drop.arrived_at + self.scenario.window_hours * HOUR
            if not (drop.waiting or drop.num_running):
                drop.finished_at = self.now
                self.open.remove(drop)
            elif is_late:
                drop.num_expired = drop.rows_left
                drop.waiting.clear()
                for machine in self.machines:
                    if machine.drop is drop:
                        machine.drop, machine.rows = None, 0.0
                self.open.remove(drop)

    def _sample(self) -> None:
        paid = [each for each in self.machines if each.paid_from is not None]
        under_way = sum(self.now - (each.paid_from or 0) for each in paid) / HOUR
        total = sum(self.week.hours.values()) + under_way
        self.week.samples.append((self.now / HOUR, len(paid), total))


def drops_of(scenario: Scenario, luck: random.Random) -> list[Drop]:
    """Return a week's files: many by day, few at night and on the last two days."""
    arrivals: list[tuple[int, int]] = []
    for hour in range(scenario.days * 24):
        is_day, is_weekend = 8 <= hour % 24 < 19, hour // 24 % 7 > 4
        share = (1.6 if is_day else 0.4) * (0.4 if is_weekend else 1.2) / 24
        for _ in range(_poisson(scenario.drops_a_day * share, luck)):
            rows = luck.lognormvariate(math.log(scenario.median_rows), scenario.spread)
            arrivals.append((int((hour + luck.random()) * HOUR), max(1, int(rows))))
        if hour % 24 == 22 and scenario.nightly_rows:
            arrivals.append((hour * HOUR, scenario.nightly_rows))
    return [_drop(at, rows, scenario.shard_rows) for at, rows in sorted(arrivals)]


def droughts_of(scenario: Scenario, luck: random.Random) -> list[tuple[int, int]]:
    """Return begin and end of the hours without machines."""
    begins = [luck.randrange(scenario.days * DAY) for _ in range(scenario.num_droughts)]
    return [(begin, begin + int(luck.uniform(1, 4) * HOUR)) for begin in begins]


def releases_of(scenario: Scenario, luck: random.Random) -> list[tuple[int, bool]]:
    """Return when something is deployed, in working hours, and whether it does not run."""
    days = [day for day in range(scenario.days) if day % 7 < 5]
    kinds = [False] * scenario.num_releases + [True] * scenario.num_bad_releases
    return sorted(
        (luck.choice(days) * DAY + int(luck.uniform(9, 18) * HOUR), is_bad) for is_bad in kinds
    )


def _drop(at: int, num_rows: int, shard_rows: int) -> Drop:
    whole, rest = divmod(num_rows, shard_rows)
    shards = [float(shard_rows)] * whole + ([float(rest)] if rest else [])
    return Drop(at, num_rows, shards, rows_left=float(num_rows))


def _poisson(rate: float, luck: random.Random) -> int:
    count, chance, limit = 0, luck.random(), math.exp(-rate)
    while chance > limit:
        chance *= luck.random()
        count += 1
    return count
