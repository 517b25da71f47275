"""What work costs is found from what it took, and remembered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tidemill.engine.speculation.cost_model import CostModel, Work

COSTS = Work(0.01, 0.0002, 0.0003, 0.0000001)
SHAPES = [
    Work(100, 40_000, 12_000, 3_000_000),
    Work(300, 5_000, 30_000, 1_000_000),
    Work(64, 150_000, 4_000, 9_000_000),
    Work(500, 1_000, 900, 100_000),
]


def seconds_of(work: Work) -> float:
    """Return what work takes by the true costs."""
    return float(np.dot(COSTS, work))


def taught(*works: Work) -> CostModel:
    """Return a model that has seen these works."""
    model = CostModel()
    for work in works:
        model.add(work, seconds_of(work))
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is remembered in a folder of the test."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))


def test_unlike_works_tell_all_costs() -> None:
    """Also of work that is like none of them."""
    another = Work(1_000, 1_000, 50_000, 20_000_000)
    assert taught(*SHAPES).seconds(another) == pytest.approx(seconds_of(another), rel=0.3)


def test_work_of_one_kind_tells_costs_as_usual() -> None:
    """Steps that are all alike tell no kinds apart: what they are like is known beforehand."""
    alike, reading = Work(100, 1_000, 25_600, 5_000_000), Work(100, 200_000, 0, 0)
    assert taught(alike).seconds(reading) == pytest.approx(seconds_of(reading), rel=0.5)


def test_no_cost_is_below_zero() -> None:
    """However the machine stumbles."""
    model = CostModel()
    for number, work in enumerate(SHAPES):
        model.add(work, seconds_of(work) * (3, 1, 0.3, 5)[number])
    costs = model.costs()
    assert costs is not None
    assert min(costs) >= 0 < max(costs)


def test_nothing_is_known_before_anything_was_computed() -> None:
    """No number stands in for it."""
    assert CostModel().seconds(SHAPES[0]) is None


def test_runs_of_a_model_on_a_device_are_remembered_together() -> None:
    """The last counts most; another model and another device know nothing of it."""
    for work in (*SHAPES, SHAPES[0]):
        model = taught(work)
        model.fixed_seconds = work.steps
        model.save("m", "cpu", seconds_of(work))
    found = CostModel.recall("m", "cpu")
    assert found is not None
    assert found.fixed_seconds == SHAPES[0].steps
    for work in SHAPES:
        assert found.seconds(work) == pytest.approx(seconds_of(work), rel=0.1)
    assert CostModel.recall("m", "another") is None


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", '{"products": 1}'])
def test_what_cannot_be_read_is_not_known(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is not to be trusted."""
    monkeypatch.setattr(
        "tidemill.engine.speculation.cost_model.CacheEntry.load",
        lambda _entry: text.encode() or None,
    )
    assert CostModel.recall("m", "cpu") is None
