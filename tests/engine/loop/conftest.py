"""Generation with and without a step in flight: the output is the same."""

from __future__ import annotations

import pytest

from tests.engine.loop.generation_rig import Rig


@pytest.fixture(params=[0, 1], ids=["in turn", "ahead"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run every `Rig` of a test with this number of steps ahead."""
    number: int = request.param
    monkeypatch.setattr(Rig, "steps_ahead", number)
    return number


@pytest.fixture(params=[False, True], ids=["at launch", "at collect"])
def is_late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make steps of every `Rig` of a test fail at launch, or at collection."""
    is_late: bool = request.param
    monkeypatch.setattr(Rig, "is_late", is_late)
    return is_late
