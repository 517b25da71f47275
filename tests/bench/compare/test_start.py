"""Start-up time: the compared commands, their order, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.compare.start import NUM_LINES, Start, run, starts, table
from bench.processes import Measured
from tidemill.demo import MODEL_PATH

SAYS = "import os; print('model loaded', '\"custom_id\"', os.environ.get('OF_THE_RUN'))"


def started(ready: float, steady: float, whole: float) -> Measured:
    """Return a run of `seconds`."""
    return Measured(whole, ready, steady, 0)


def test_seconds_count_from_the_launch() -> None:
    """The first row comes after the model; a median has its range, a single run has none."""
    runs = [started(2.0, 0.5, 3.0), started(1.0, 0.25, 2.0), started(4.0, 1.0, 9.0)]
    lines = table({"warm": runs, "first": runs[:1]}).splitlines()
    assert lines[0] == "| | model loaded, s | first row, s | exit, s |"
    assert lines[2] == "| warm | 2.00 (1.00–4.00) | 2.50 (1.25–5.00) | 3.00 (2.00–9.00) |"
    assert lines[3] == "| first | 2.00 | 2.50 | 3.00 |"


def test_all_take_turns_after_a_round_that_does_not_count(tmp_path: Path) -> None:
    """First starts on a machine run once; each run requests a new environment."""
    numbers = iter(range(100))
    command = [sys.executable, "-c", SAYS]
    often = Start("often", command, lambda: {"OF_THE_RUN": str(next(numbers))})
    once = Start("once", command, dict, is_once=True)
    found = run([often, once], 2, tmp_path)
    assert [len(found[name]) for name in ("often", "once")] == [2, 1]
    assert "2" in (tmp_path / "log").read_text()


def test_a_cold_start_has_empty_caches_and_a_warm_one_the_last_starts(tmp_path: Path) -> None:
    """Results and kernels are cached in new folders, so the user's caches do not count."""
    found = {start.name: start for start in starts([str(MODEL_PATH)], tmp_path)}
    first, cold, warm = (
        [found[f"demo: tidemill, {kind}"].environment() for _ in range(2)]
        for kind in ("first on a machine", "cold", "warm")
    )
    assert warm[0] == warm[1]
    assert cold[0]["TIDEMILL_CACHE"] != cold[1]["TIDEMILL_CACHE"]
    assert cold[0]["NUMBA_CACHE_DIR"] == warm[0]["NUMBA_CACHE_DIR"]
    assert first[0]["NUMBA_CACHE_DIR"] != first[1]["NUMBA_CACHE_DIR"]
    places = [place for one in (*first, *cold, *warm) for place in one.values() if place]
    assert all(Path(place).is_relative_to(tmp_path) for place in places)
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert len({json.loads(line)["custom_id"] for line in lines}) == NUM_LINES
