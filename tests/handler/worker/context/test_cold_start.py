"""Durations of a worker's start: each step once, from its own source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.handler.emf import lines_in
from tests.handler.worker.rig import Rig, until
from tidemill.handler.observability import Metric
from tidemill.handler.worker.context.cold_start import ColdStart, process_age, read_task, task_steps

# The ECS agent's metadata of a task: times in nanoseconds.
TASK = {
    "PullStartedAt": "2026-10-02T00:43:06.202617438Z",
    "PullStoppedAt": "2026-10-02T00:44:36.702617438Z",
}
PULLED = 1790901876.702617


def test_a_step_is_reached_once() -> None:
    """Counted from the start of the process, which was before its clock was looked at."""
    now = [100.0]
    start = ColdStart(2.5, lambda: now[0])
    assert start.reach("process")
    now[0] = 110.0
    assert not start.reach("process")
    assert start.reach("row")
    start.note(weights_seconds=7.0)
    assert start.steps == {"process_seconds": 2.5, "row_seconds": 12.5, "weights_seconds": 7.0}
    assert start.figures() == {
        Metric.COLD_START_WEIGHTS_SECONDS: 7.0,
        Metric.COLD_START_ROW_SECONDS: 12.5,
    }


def test_a_process_knows_how_old_it_is(tmp_path: Path) -> None:
    """The kernel's start time decides, whatever characters the process name has."""
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "self").mkdir()
    (tmp_path / "uptime").write_text("1000.5 77.0\n")
    before = " ".join(["S", *"0" * 18])
    (tmp_path / "self/stat").write_text(f"7 (a) b) {before} {990 * ticks} 0 0")
    assert process_age(tmp_path) == (10.5, 1000.5)
    assert process_age(tmp_path / "nowhere") == (0.0, 0.0)


def test_ecs_reports_the_image_pull() -> None:
    """It has the pull's duration, and the time between the pull and the process."""
    assert task_steps(TASK, PULLED + 3) == {"image_seconds": 90.5, "container_seconds": 3.0}


@pytest.mark.parametrize("task", [{}, {"PullStartedAt": 7}, TASK | {"PullStoppedAt": "soon"}])
def test_a_task_without_metadata_has_no_steps(task: dict[str, Any]) -> None:
    """A machine may already have had the image, for example."""
    assert task_steps(task, 0) == {}


@pytest.mark.parametrize(
    ("answer", "found"),
    [(json.dumps(TASK), TASK), ("[]", {}), ("{", {}), (None, {})],
    ids=["complete", "a list", "torn", "silent"],
)
def test_the_ecs_metadata_is_read_if_there_is_any(
    tmp_path: Path, answer: str | None, found: dict[str, Any]
) -> None:
    """A worker starts, whatever the reply."""
    if answer is not None:
        (tmp_path / "task").write_text(answer)
    assert read_task({"ECS_CONTAINER_METADATA_URI_V4": tmp_path.as_uri()}) == found
    assert read_task({}) == {}


async def test_a_start_is_reported_with_the_first_row(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported once, in the log and as metrics, whatever follows."""
    work = rig.batch({}, {}, {})
    async with rig.worker():
        await until(lambda: work.is_done)
    starts = [
        line for line in lines_in(capsys.readouterr().out) if "ColdStartRowSeconds" in line.figures
    ]
    assert len(starts) == 1
    assert starts[0].figures["ColdStartRowSeconds"] >= starts[0].figures["ColdStartReadySeconds"]
