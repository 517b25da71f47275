"""Duration of a worker's start: the parsed log and its display."""

from __future__ import annotations

import json

import pytest

from bench.cloud.worker_start import STEPS, cold_start, table


def test_the_steps_are_those_that_the_worker_logs() -> None:
    """Among all else that it logs, and what its engine says in plain words."""
    message = {"message": "cold start", "ready_seconds": 7.5, "token_seconds": 8}
    log = "\n".join(['{"message": "claimed"}', "compiling", json.dumps(message)])
    assert cold_start(log) == {"ready_seconds": 7.5}
    with pytest.raises(LookupError, match="no cold start"):
        cold_start("compiling\n")


def test_a_step_is_the_median_of_all_runs() -> None:
    """One that was not logged took nothing."""
    runs = [{"ready_seconds": seconds} for seconds in (1.0, 9.0, 2.0)]
    title, _, line = table([("demo: new", runs)]).splitlines()
    column = [cell.strip() for cell in title.split("|")].index("ready at")
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[column] == "2.00"
    assert cells.count("0.00") == len(STEPS) - 1
