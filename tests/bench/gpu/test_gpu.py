"""The script for a GPU, tried without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu import gpu
from bench.gpu.gpu import PARTS, Part, Results, attempt, missing, run_part, work
from bench.gpu.parts import ceilings
from bench.gpu.parts.accuracy import held
from bench.gpu.parts.generation import covered
from bench.gpu.parts.report import report
from bench.gpu.parts.steps import PagedSequences, Piece
from bench.gpu.parts.task import Place, Task

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.mark.long
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """Interpreted, on tiny shapes: no task fails, and what kernels give holds."""
    path = tmp_path / "results.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "bench.gpu.gpu", "--tiny", "--results", str(path)],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=True,
    ).stdout
    parts = json.loads(path.read_text())["parts"]
    assert parts.keys() == {part.name for part in PARTS}
    for name, part in parts.items():
        assert part["status"] == "done", (name, part)
        for task, numbers in part["tasks"].items():
            assert "error" not in numbers, (name, task, numbers)
            assert numbers.get("holds", True), (name, task, numbers)
            assert f"| {task} |" in told


def fails(_place: Place) -> Iterator[Task]:
    """Yield a task that goes well, and one that does not."""
    yield Task("well", lambda: {"outputs_per_second": 3.0})
    yield Task("badly", lambda: {"never": 1 / 0})


def test_a_task_that_fails_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it failed with is written down, and it alone is done again."""
    monkeypatch.setattr(ceilings, "tasks", fails)
    (tmp_path / gpu.FOUND).write_text("{}")
    work("ceilings", tmp_path, is_tiny=True)
    lines = [json.loads(line) for line in (tmp_path / "ceilings.jsonl").read_text().splitlines()]
    assert [line["task"] for line in lines] == ["well", "badly"]
    assert "ZeroDivisionError" in lines[1]["error"]
    found = {line.pop("task"): line for line in lines}
    (tmp_path / gpu.FOUND).write_text(json.dumps({"ceilings": found}))
    (tmp_path / "ceilings.jsonl").write_text("")
    work("ceilings", tmp_path, is_tiny=True)
    again = [
        json.loads(line)["task"] for line in (tmp_path / "ceilings.jsonl").read_text().splitlines()
    ]
    assert again == ["badly"]


def test_a_part_that_hangs_leaves_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its time and no more; the next part is not touched by it."""

    def hang(_command: list[str], *, timeout: float, **_: object) -> None:
        (tmp_path / "speed.jsonl").write_text('{"task": "one", "seconds": 2}\n')
        raise subprocess.TimeoutExpired("it", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    results = Results(tmp_path / "results.json")
    run_part(Part("speed", 7), results, tmp_path, is_tiny=True, seconds=7)
    read = json.loads((tmp_path / "results.json").read_text())["parts"]["speed"]
    assert read["status"] == "ran out of 7 s"
    assert read["tasks"] == {"one": {"seconds": 2}}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    """A part is where all of its tasks went well; others may be asked for by name."""
    path = tmp_path / "results.json"
    results = Results(path)
    for part in PARTS:
        results.found(part.name)["a task"] = {"seconds": 1}
        results.note(part.name, status="done")
    again = Results(path)
    assert not list(missing(frozenset(), again))
    again.found("speed")["a task"] = {"error": "no"}
    again.note("rows", status="ended with -9")
    assert [part.name for part in missing(frozenset(), again)] == ["speed", "rows"]
    assert [part.name for part in missing(frozenset({"rows"}), again)] == ["rows"]


def test_what_is_off_is_told_in_units() -> None:
    """Of the number's own size, or of the mean where it is small; what is no number never holds."""
    expected = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    unit = torch.finfo(torch.float16).eps
    near = held([(expected + torch.tensor([2 * unit, 0, 0]), expected)], torch.float16, 4)
    assert near["units_off"] == pytest.approx(2 / (5 / 3) ** 0.5, rel=1e-3)
    assert near["holds"]
    assert not held([(expected * torch.nan, expected)], torch.float16, 4)["holds"]
    assert not held([(expected + 1, expected)], torch.float16, 4)["holds"]


def test_time_is_covered_once() -> None:
    """By whatever runs beside."""
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([]) == 0


def test_steps_find_their_pages() -> None:
    """Decodes first; what is shared lies on the same pages, nothing else does."""
    sequences = PagedSequences([8, 8, 3], shared=4)
    step = sequences.step([Piece(0, 0, 8), Piece(1, 7, 8), Piece(2, 0, 3)], 4, CPU)
    assert step.num_decodes == 1
    assert step.context_lengths.tolist() == [7, 0, 0]
    assert step.query_starts.tolist() == [0, 1, 9, 12]
    decode, chunk, short = (
        step.pages[first:last].tolist()
        for first, last in zip(step.page_starts[:-1], step.page_starts[1:], strict=True)
    )
    assert decode[0] == chunk[0] == short[0]
    assert len({decode[1], chunk[1], decode[0]}) == 3
    assert step.slots.tolist()[0] == decode[1] * 4 + 3


def test_a_report_tells_what_failed() -> None:
    """And what missed its bound."""
    attempted = attempt(Task("badly", lambda: {"never": 1 / 0}))
    parts = {
        "speed": {
            "status": "done",
            "seconds": 3,
            "tasks": {"slow": {"share_of_copy": 0.5, "bound": 0.85, "holds": False}},
        },
        "rows": {"status": "ended with -9", "tasks": {"rows": attempted}},
    }
    card, versions = {"name": "a card"}, {"torch": "2"}
    lines = list(report({"card": card, "versions": versions, "command": "x", "parts": parts}))
    assert "| slow | 50% of a copy | 0.85 **missed** |" in lines
    assert any("**failed**: ZeroDivisionError" in line for line in lines)
