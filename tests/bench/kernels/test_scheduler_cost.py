"""Cost of a step in Python, in each measured situation."""

from __future__ import annotations

import pytest

from bench.kernels import scheduler_cost
from bench.kernels.scheduler_cost import SITUATIONS, table
from tests.long_parameters import with_long


@pytest.mark.parametrize("steps_ahead", with_long([1], [0]))
def test_every_situation_lasts_as_long_as_it_is_timed(
    steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None runs out of sequences, whose steps would then cost nothing."""
    running = []

    class Watched(scheduler_cost.Situation):
        """A situation that records how many sequences run when timing starts."""

        def time(self, *args: object) -> scheduler_cost.Times:
            times = super().time(*args)
            running.append(self.core.stats().running)
            return times

    monkeypatch.setattr(scheduler_cost, "Situation", Watched)
    lines = list(table([32], steps_ahead))
    assert len(lines) == 2 + len(SITUATIONS) == 3 + len(running)  # texts end with their step
    assert all(count > 10 for count in running)
    assert all("| 0.00 |" not in line for line in lines)
