"""The costs of work are estimated from measured times and saved."""

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
    """Return the time that work takes at the true costs."""
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


def test_varied_work_reveals_all_costs() -> None:
    """The estimates also hold for work of other shapes."""
    another = Work(1_000, 1_000, 50_000, 20_000_000)
    assert taught(*SHAPES).seconds(another) == pytest.approx(seconds_of(another), rel=0.3)


def test_work_of_one_kind_falls_back_to_typical_costs() -> None:
    """Steps that are all alike cannot separate the costs, so the typical ratios are used."""
    alike, reading = Work(100, 1_000, 25_600, 5_000_000), Work(100, 200_000, 0, 0)
    assert taught(alike).seconds(reading) == pytest.approx(seconds_of(reading), rel=0.5)


def test_no_cost_is_below_zero() -> None:
    """It holds even for noisy measurements."""
    model = CostModel()
    for number, work in enumerate(SHAPES):
        model.add(work, seconds_of(work) * (3, 1, 0.3, 5)[number])
    costs = model.costs()
    assert costs is not None
    assert min(costs) >= 0 < max(costs)


def test_nothing_is_known_before_anything_was_computed() -> None:
    """There is no default estimate."""
    assert CostModel().seconds(SHAPES[0]) is None


def test_runs_of_a_model_on_a_device_are_remembered_together() -> None:
    """The last run counts most; other models and devices have separate costs."""
    for work in (*SHAPES, SHAPES[0]):
        model = taught(work)
        model.fixed_seconds = work.steps
        model.save("m", "cpu", seconds_of(work))
    model = CostModel.recall("m", "cpu")
    assert model is not None
    assert model.fixed_seconds == SHAPES[0].steps
    for work in SHAPES:
        assert model.seconds(work) == pytest.approx(seconds_of(work), rel=0.1)
    assert CostModel.recall("m", "another") is None


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", '{"products": 1}'])
def test_an_unreadable_cache_entry_is_ignored(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is not to be trusted."""
    monkeypatch.setattr(
        "tidemill.engine.speculation.cost_model.CacheEntry.load",
        lambda _entry: text.encode() or None,
    )
    assert CostModel.recall("m", "cpu") is None
