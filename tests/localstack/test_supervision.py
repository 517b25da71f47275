"""Workers that end by themselves: started again, each time later, and then given up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from localstack.processes import Processes
from localstack.supervision import MAX_TRIES, Workers, why_ended

ENDS = "import sys; sys.exit({status})"


@dataclass
class Rig:
    """Processes of one name that end at once, a clock, and what was said."""

    processes: Processes
    now: float = 0.0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make what looks after them."""
        self.workers = Workers(self.processes, self.said.append, lambda: self.now)

    def start(self, code: str) -> None:
        """Start one."""
        self.processes.start("worker-m-1", sys.executable, "-c", code)

    def look(self) -> None:
        """Wait for the process's end and let it be noticed."""
        self.processes.processes["worker-m-1"].wait()
        self.workers.tend()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Return a rig without processes."""
    with Processes({}, tmp_path) as processes:
        yield Rig(processes)


def test_a_worker_that_ends_comes_back_later_each_time_and_is_given_up(rig: Rig) -> None:
    """Each end is one line with the reason; the last says what goes on and where to look."""
    rig.start(ENDS.format(status=1))
    waits = []
    for _ in range(MAX_TRIES):
        rig.look()
        before = rig.processes.processes["worker-m-1"]
        rig.look()
        assert rig.processes.processes["worker-m-1"] is before, "it came back too early"
        waits.append(float(rig.said[-1].split()[-2]))
        rig.now += waits[-1]
        rig.look()
        assert rig.processes.processes["worker-m-1"] is not before
    rig.look()
    rig.now += 1000
    rig.look()
    assert waits == [1, 2, 4, 8, 16]
    assert rig.said[0] == ("worker-m-1 ended: exited with status 1; starting it again in 1 s")
    log = rig.processes.folder / "worker-m-1.log"
    [last] = rig.said[MAX_TRIES:]
    assert last == (
        "worker-m-1 ended 6 times in a row and is not started again: exited with status 1. "
        f"Batches of its model wait; API and dashboard go on. Its log is {log}"
    )
    assert rig.workers.given_up == {"worker-m-1": "exited with status 1"}


def test_a_setting_that_cannot_be_is_not_tried_again(rig: Rig) -> None:
    """A worker that was refused says why, and would say it again."""
    rig.start("import sys; sys.exit('tidemill: no such dtype' and 2)")
    rig.look()
    assert rig.said[0].startswith("worker-m-1 ended and is not started again: exited with status 2")


def test_one_that_has_worked_for_long_starts_with_fresh_tries(rig: Rig) -> None:
    """Five ends in a month are no broken worker."""
    rig.start(ENDS.format(status=1))
    for _ in range(2 * MAX_TRIES):
        rig.now += 1000
        rig.look()
        rig.now += 1
        rig.look()
    assert {line.split()[-2] for line in rig.said} == {"1"}


@pytest.mark.parametrize(
    ("status", "log", "reason"),
    [
        (-9, "tidemill: old news\n", "killed by SIGKILL"),
        (1, "", "exited with status 1"),
        (1, "noise\ntidemill: AWS cannot be used: no\nmore noise\n", "AWS cannot be used: no"),
        (
            1,
            '{"level":"ERROR","message":"refused","reason":"no model"}\n[1]\n',
            "refused: no model",
        ),
    ],
)
def test_the_reason_is_the_last_complaint(status: int, log: str, reason: str) -> None:
    """What a person would look for in the log."""
    assert why_ended(status, log) == reason
