"""A week of workers without AWS: everything is run, and what the code under trial does is seen."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from bench.fleet_plot import Drawn, plot
from bench.fleet_site import HOUR, Policy, Scenario, Site, Week
from bench.fleet_week import POLICIES, Alarmed, Launched, row, scenario_of, simulate

CALM = Scenario(days=2, num_droughts=0, num_releases=0, num_bad_releases=0)
BAD = replace(CALM, num_bad_releases=1)


@pytest.mark.parametrize("make", POLICIES.values(), ids=["launcher", "alarms"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_row_is_run_once(make: type[Policy], seed: int) -> None:
    """Through droughts, machines that are taken and a release that dies; the work is the rows'."""
    scenario = Scenario(days=3)
    week = simulate(scenario, make, seed)
    assert week.drops
    for drop in week.drops:
        assert drop.finished_at is not None
        assert drop.finished_at >= drop.arrived_at
        assert drop.rows_left == pytest.approx(0, abs=1e-3)
    num_rows = sum(drop.num_rows for drop in week.drops)
    assert week.hours["work"] == pytest.approx(num_rows / scenario.rows_per_second / HOUR)
    assert simulate(scenario, make, seed).hours == week.hours


def test_a_launcher_pays_less_than_alarms() -> None:
    """Without any misfortune, too: it starts what the target needs, and nobody waits for more."""
    launched, alarmed = (simulate(CALM, make, 3) for make in (Launched, Alarmed))
    assert launched.hours["work"] == pytest.approx(alarmed.hours["work"])
    for what in ("start", "idle"):
        assert launched.hours[what] < alarmed.hours[what] / 2
    limit = (CALM.target_seconds + 2 * CALM.start_seconds) / 60
    assert max(minutes for _, minutes in launched.delays()) < limit


def test_the_brake_ends_a_crash_loop_that_alarms_pay_for() -> None:
    """A few starts of the release, and none until it is mended; a service tries for hours."""
    launched, alarmed = (
        [simulate(BAD, make, seed) for seed in range(6)] for make in (Launched, Alarmed)
    )
    assert 0 < max(week.hours["crash"] for week in launched) < 3
    assert max(week.hours["crash"] for week in alarmed) > 30


def test_nobody_asks_again_and_again_where_there_is_no_machine() -> None:
    """A launcher that is refused waits longer each time; afterwards it goes on by itself."""
    scenario = replace(CALM, days=1, drops_a_day=0, spot_hours=1e6)
    asked: list[int] = []

    class Dry(Site):
        def is_drought(self) -> bool:
            dry = 22 * HOUR <= self.now < 25 * HOUR
            if dry:
                asked.append(self.now)
            return dry

    week = Dry(scenario, Launched(scenario), 1).run()
    assert 5 < len(asked) < 30
    [drop] = week.drops
    assert drop.finished_at is not None
    assert 25 * HOUR < drop.finished_at < 27 * HOUR


def test_the_table_and_the_plot_are_of_the_weeks() -> None:
    """A row has the sum of the hours first, and the picture is an SVG of both policies."""
    weeks = {name: [simulate(CALM, make, 1)] for name, make in POLICIES.items()}
    for name, [week] in weeks.items():
        cells = [cell.strip() for cell in row(name, [week]).strip("| ").split("|")]
        assert cells[:2] == [name, f"{sum(week.hours.values()):,.0f}"]
        assert week.samples == sorted(week.samples, key=lambda sample: sample[2])
    drawn = {name: Drawn(week.samples, week.delays()) for name, [week] in weeks.items()}
    picture = ET.fromstring(plot(drawn))  # noqa: S314 - our own
    name = "{http://www.w3.org/2000/svg}"
    assert len(picture.findall(f"{name}circle")) == sum(
        len(week.drops) for [week] in weeks.values()
    )
    typed = scenario_of(["days=2", "spot_hours=2.5"])
    assert typed == replace(Scenario(), days=2, spot_hours=2.5)
    assert plot({"nothing": Drawn([], Week().delays())}).startswith("<svg")
