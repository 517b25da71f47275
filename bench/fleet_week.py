"""A week of one model's workers: what is paid and how long batches take, without AWS.

    python -m bench.fleet_week --plot docs/images/fleet-week.svg

Files arrive by the hour of the day, machines take minutes to start, Spot takes them back, for hours
there are none, and one release dies of its start. The same weeks are gone through twice: by the
code that starts workers here (`handler.fleet`: `ensure` with `wanted`, `plan_moves` and the brake),
and by the alarms that it replaced, as they were: intake sets the count to 1, a worker for each
shard by the queue's metrics, all stopped after a quarter of an hour without work, ECS starts again
what ends, and nobody is told before six hours of a crash loop. `Scenario` says what is assumed.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from bench.fleet_plot import Drawn, plot
from bench.fleet_site import DAY, HOUR, MINUTE, Drop, Machine, Policy, Scenario, Site, Week
from handler.aws.calls import Operation, T
from handler.aws.stores.processes import Process
from handler.batch.fleet import End, EndKind, FleetPlan, FleetState, OpenWork, Pace
from handler.fleet.brake import counted, may_have_rows
from handler.fleet.ensure import ensure
from handler.fleet.launcher import NoCapacity
from handler.fleet.stop import running

_MODEL = "m"


class Launched:
    """The code of this project, with memory in place of the table and a list of processes."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._state, self._pace = FleetState(), Pace()
        self._site: Site | None = None
        self.fleets = self.processes = self  # as `ensure` knows a deployment

    def exits_idle(self) -> bool:
        """Workers end by themselves."""
        return True

    def arrived(self, site: Site, drop: Drop) -> None:
        """Do what intake does when shards are queued."""
        self._ensure(site, [drop], sees_all=False)

    def look(self, site: Site) -> None:
        """Do what the reaper does each minute, with what workers have told of their pace."""
        busy = [each for each in site.machines if each.drop is not None]
        if busy:
            self._pace = Pace(site.now, self._scenario.rows_per_second)
        if site.open:
            self._ensure(site, site.open, sees_all=True)

    def ended(self, site: Site, machine: Machine, kind: EndKind) -> None:
        """Do what the event of an end does."""
        self._site = site
        end = End(_MODEL, machine.id, machine.release, site.now, kind, "It ended.", 1)
        mine: Any = self
        plan = self._plan(site)
        workers = _drive(running(mine, plan))
        pace = self._pace if may_have_rows(workers, plan.release) else Pace()
        self._state = counted(self._state, end, plan, pace, site.now)
        if self._state.brake is not None:
            site.alarm()

    def _ensure(self, site: Site, drops: Sequence[Drop], *, sees_all: bool) -> None:
        self._site = site
        work = [_open_work(drop, self._scenario) for drop in drops]
        mine: Any = self
        _drive(ensure(mine, self._plan(site), work, site.now, sees_all=sees_all))

    def _plan(self, site: Site) -> FleetPlan:
        return FleetPlan(
            _MODEL,
            "processes",
            site.release,
            self._scenario.max_workers,
            self._scenario.target_seconds,
            self._scenario.start_seconds,
        )

    # What stands for the stores

    def get_state(self, _: str) -> Operation[FleetState]:
        """Return the state of the fleet."""
        yield from ()
        return self._state

    def get_pace(self, _: str) -> Operation[Pace]:
        """Return the pace of the fleet."""
        yield from ()
        return self._pace

    def change(self, _: str, change: Callable[[FleetState], FleetState]) -> Operation[FleetState]:
        """Change the state."""
        yield from ()
        self._state = change(self._state)
        return self._state

    def list_processes(self, _: str) -> Operation[list[Process]]:
        """Return the workers that there are."""
        yield from ()
        assert self._site is not None
        return [_process(each, self._site.now) for each in self._site.machines]

    def ask(self, _: str, __: Process) -> Operation[None]:
        """Start a worker, if a machine can be had."""
        yield from ()
        assert self._site is not None
        if self._site.is_drought():
            raise NoCapacity("There is no machine.")
        self._site.start()

    def tell(self, _: str, worker: str, __: str, ___: int) -> Operation[bool]:
        """Stop a worker."""
        yield from ()
        assert self._site is not None
        for machine in self._site.machines:
            if machine.id == worker:
                self._site.stop(machine)
        return True


def _process(machine: Machine, now: int) -> Process:
    if machine.stops_at is not None:
        return Process(machine.id, machine.release, "stopping", machine.asked_at)
    if machine.is_ready(now):
        return Process(machine.id, machine.release, "running", machine.asked_at)
    return Process(machine.id, machine.release, "asked", machine.asked_at)


def _open_work(drop: Drop, scenario: Scenario) -> OpenWork:
    return OpenWork(
        str(drop.arrived_at),
        _MODEL,
        math.ceil(drop.rows_left),
        len(drop.waiting) + drop.num_running,
        drop.arrived_at + scenario.window_hours * HOUR,
        num_running=drop.num_running,
        rows_per_second=drop.num_running * scenario.rows_per_second,
        since=drop.arrived_at,
    )


def _drive(operation: Operation[T]) -> T:
    try:
        call = next(operation)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError(f"nothing here asks AWS, and this does: {call}")


class Alarmed:
    """The service with alarms: a count that is set, and ECS that keeps so many tasks running."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._count = 0
        self._changed_at = -DAY
        self._backlogs: list[int] = []
        self._num_idle = 0
        self._metrics_from = 0
        self._worked_at = -DAY
        self._first_crash: int | None = None

    def exits_idle(self) -> bool:
        """Workers are stopped by an alarm alone."""
        return False

    def arrived(self, site: Site, drop: Drop) -> None:  # noqa: ARG002 - the Protocol's
        """Do what intake did: one worker at least."""
        if site.now - self._worked_at > 6 * HOUR:  # the queue's metrics come back late
            self._metrics_from = site.now + 15 * MINUTE
        self._count = max(1, self._count)

    def look(self, site: Site) -> None:
        """Do what alarms did each minute by metrics of two minutes ago, and then ECS."""
        backlog = sum(len(drop.waiting) + drop.num_running for drop in site.open)
        self._worked_at = site.now if backlog else self._worked_at
        self._backlogs = [*self._backlogs[-2:], backlog]
        is_known = site.now >= self._metrics_from
        self._scale(site, self._backlogs[0] if is_known else None)
        self._reconcile(site)
        if self._first_crash is not None and site.now - self._first_crash >= 6 * HOUR:
            self._first_crash = None
            site.alarm()

    def ended(self, site: Site, machine: Machine, kind: EndKind) -> None:  # noqa: ARG002
        """Take note of the first end of a crash loop; ECS starts another task."""
        if kind is EndKind.BAD and self._first_crash is None:
            self._first_crash = site.now

    def _scale(self, site: Site, backlog: int | None) -> None:
        tasks = any(machine.is_ready(site.now) for machine in site.machines)
        self._num_idle = self._num_idle + 1 if tasks and backlog == 0 else 0
        wanted = self._count
        if backlog:
            wanted = min(backlog, self._scenario.max_workers)
        elif self._num_idle >= 15:
            wanted = 0
        is_cool = site.now - self._changed_at >= 15 * MINUTE
        if wanted > self._count or (wanted < self._count and is_cool):
            self._count, self._changed_at = wanted, site.now

    def _reconcile(self, site: Site) -> None:
        """Start what is missing; stop what is too much or old, but never who has a shard."""
        alive = [each for each in site.machines if each.stops_at is None]
        for machine in alive:
            if machine.drop is None and machine.release != site.release:
                site.stop(machine)
        alive = [each for each in alive if each.stops_at is None]
        idle = [each for each in alive if each.drop is None]
        for machine in idle[: max(0, len(alive) - self._count)]:
            site.stop(machine)
        for _ in range(self._count - len(alive)):
            site.start()


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the code under trial from logging a week of events."""
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def simulate(scenario: Scenario, make_policy: Callable[[Scenario], Policy], seed: int) -> Week:
    """Return what a week of this seed comes to."""
    with _silence():
        return Site(scenario, make_policy(scenario), seed).run()


def row(name: str, weeks: Sequence[Week]) -> str:
    """Return the line of the table for one policy: means of weeks, delays of all their files."""
    hours = {what: mean(week.hours[what] for week in weeks) for what in weeks[0].hours}
    delays = sorted(minutes for week in weeks for _, minutes in week.delays())
    tenths = quantiles(delays, n=10)
    late = sum(delay > 75 for delay in delays) / len(delays)
    expired = sum(drop.num_expired for week in weeks for drop in week.drops) / len(weeks)
    cells = (
        name,
        f"{sum(hours.values()):,.0f}",
        *(f"{hours[what]:,.0f}" for what in hours),
        f"{mean(week.num_starts for week in weeks):,.0f}",
        f"{tenths[4]:,.0f}",
        f"{tenths[8]:,.0f}",
        f"{delays[-1] / 60:,.1f} h",
        f"{late:.0%}",
        f"{expired:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


POLICIES: dict[str, Callable[[Scenario], Policy]] = {
    "launcher and brake": Launched,
    "service and alarms": Alarmed,
}


def scenario_of(changes: Sequence[str]) -> Scenario:
    """Return the scenario with fields that were typed as `name=value`."""
    scenario = Scenario()
    for change in changes:
        name, _, value = change.partition("=")
        kind = type(getattr(scenario, name))
        scenario = replace(scenario, **{name: kind(value)})
    return scenario


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table over some weeks, and plot the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--weeks", type=int, default=10)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], help="a field of Scenario: name=value"
    )
    parsed = parser.parse_args(arguments)
    scenario = scenario_of(parsed.set)
    found = {
        name: [simulate(scenario, make, 10 * seed) for seed in range(parsed.weeks)]
        for name, make in POLICIES.items()
    }
    print(
        "| a week | GPU hours | work | start | idle | crash loop | starts "
        "| median, min | of ten the slowest, min | longest | over 75 min | rows expired |"
    )
    print("|---|" + "---:|" * 11)
    for name, weeks in found.items():
        print(row(name, weeks))
    if parsed.plot is not None:
        drawn = {name: Drawn(weeks[0].samples, weeks[0].delays()) for name, weeks in found.items()}
        parsed.plot.write_text(plot(drawn))


if __name__ == "__main__":
    main()
