"""The script for a GPU, tested without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import gpu
from bench.gpu import work as working
from bench.gpu.gpu import EXTRA, PARTS, SECONDS, Part, grouped, run_all
from bench.gpu.parts.accuracy import held
from bench.gpu.parts.profiles import covered
from bench.gpu.parts.report import report
from bench.gpu.parts.steps import PagedSequences, Piece
from bench.gpu.parts.task import Task, card_like
from bench.gpu.results import WHOLE, Results
from bench.gpu.work import BROKEN, LEFT, Claims, attempt, work

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
# Parts of two good tasks and, between them, a bad one, which a file makes good.
FAULTY = """
import os, signal, time
from pathlib import Path
from bench.gpu.parts.task import Place, Task, card_like

FOLDER = Path(__file__).parent

def call(name, fault=None):
    with (FOLDER / "calls").open("a") as file:
        file.write(name + "\\n")
    if fault and not (FOLDER / "mended").exists():
        fault()
    return {"process": os.getpid()}

def tasks(_place):
    yield Task("first", lambda: call(NAME + " first"), 0)
    yield Task("bad", lambda: call(NAME + " bad", FAULT), 0)
    yield Task("last", lambda: call(NAME + " last"), 0)
"""
FAULTS = {
    "crashes": "lambda: os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "lambda: time.sleep(600)",
    "fine": "None",
}


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write modules of faulty parts to a folder that processes import from; return it."""
    for name, fault in FAULTS.items():
        text = f"{FAULTY}\nNAME, FAULT = {name!r}, {fault}\n"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    return tmp_path


@pytest.mark.long
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """Interpreted, on tiny shapes: no task fails, and what kernels give holds."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    output = subprocess.run(
        [sys.executable, "-m", "bench.gpu.gpu", "--tiny", "--results", str(tmp_path)],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2000,
        check=True,
    ).stdout
    parts = Results(tmp_path).read()
    assert parts.keys() == {part.name for part in PARTS}
    assert len(list(tmp_path.iterdir())) <= 8
    for name, part in parts.items():
        assert part[WHOLE]["status"] == "done", (name, part)
        for task, numbers in part.items():
            assert "error" not in numbers, (name, task, numbers)
            assert numbers.get("holds", True), (name, task, numbers)
            assert task == WHOLE or f"{name}: {task}: " in output


@pytest.mark.long
def test_a_part_that_crashes_or_hangs_leaves_the_rest(
    faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks around a crash and before a hang are kept; a second call does the others."""
    results, calls = Results(faulty / "results"), faulty / "calls"
    parts = (
        Part("crashes", 12, module="crashes"),
        Part("hangs", 12, is_concurrent=True, module="hangs"),
        Part("fine", 20, processes=2, module="fine"),
    )

    def clock() -> float:
        """Jump past a part's time when the one has ended, and the other does nothing but hang."""
        found = results.read()
        has_ended, was_cut = WHOLE in found.get("crashes", {}), "bad" in found.get("hangs", {})
        hangs = calls.exists() and "hangs bad" in calls.read_text()
        return time.monotonic() + (10_000 if has_ended and hangs and not was_cut else 0)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    run_all(parts, results, 600, is_tiny=True)
    found = results.read()
    assert found["crashes"]["bad"]["error"] == f"its process ended with -{int(signal.SIGSEGV)}"
    assert found["hangs"]["bad"]["error"].startswith("cut off after")
    assert found["fine"][WHOLE]["status"] == "done"
    done = {
        part: {task for task in found[part] if "process" in found[part][task]} for part in found
    }
    assert done == {
        "crashes": {"first", "last"},
        "hangs": {"first"},
        "fine": {"first", "bad", "last"},
    }
    assert len(calls.read_text().splitlines()) == len(set(calls.read_text().splitlines()))

    calls.unlink()
    (faulty / "mended").touch()
    run_all(parts, results, 600, is_tiny=True)
    assert sorted(calls.read_text().split("\n")[:-1]) == ["crashes bad", "hangs bad", "hangs last"]
    assert all(part[WHOLE]["status"] == "done" for part in results.read().values())


def test_a_cut_loses_nothing_that_has_ended(faulty: Path) -> None:
    """After a kill, finished tasks are found, and the next call runs the rest."""
    results = Results(faulty / "results")
    start = (
        "from pathlib import Path; from bench.gpu.gpu import *; "
        f"run_all([Part('hangs', 60, module='hangs')], Results(Path({str(results.folder)!r})), 60, "
        "is_tiny=True)"
    )
    started = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.DEVNULL)
    while "first" not in results.read().get("hangs", {}):
        time.sleep(0.05)
    process = results.read()["hangs"]["first"]["process"]
    os.kill(started.pid, signal.SIGKILL)
    os.kill(process, signal.SIGKILL)
    started.wait()
    (faulty / "mended").touch()
    with (results.folder / "results.jsonl").open("a") as file:
        file.write('{"part": "hangs", "task": "ba')  # a line that was being written
    run_all([Part("hangs", 60, module="hangs")], results, 60, is_tiny=True)
    assert results.read()["hangs"]["first"]["process"] == process
    assert results.read()["hangs"][WHOLE]["status"] == "done"


def worked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tasks: list[Task], until: float = float("inf")
) -> int:
    """Run tasks as a separate part in this process; return the exit status."""
    monkeypatch.setitem(sys.modules, "a_part", SimpleNamespace(tasks=lambda _place: iter(tasks)))
    results, claims = Results(folder / "results"), folder / "claims"
    results.open()
    claims.mkdir(exist_ok=True)
    return work("part", "a_part", results, Claims(claims), until, is_tiny=False)


def good() -> dict[str, Any]:
    """Run a task that succeeds."""
    return {"outputs_per_second": 3.0}


def test_a_task_without_room_is_left_for_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter one behind it is done."""
    tasks = [Task("long", good, 100), Task("short", good, 0)]
    assert worked(tmp_path, monkeypatch, tasks, time.monotonic() + 50) == LEFT
    assert results_of(tmp_path).keys() == {"short"}
    assert worked(tmp_path, monkeypatch, tasks) == 0
    assert results_of(tmp_path).keys() == {"long", "short"}


def test_processes_of_a_part_share_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that one process has claimed is not run by another; the current task is known."""
    (tmp_path / "claims").mkdir()
    claims = Claims(tmp_path / "claims")
    assert claims.claim("8B, 1/2")
    assert worked(tmp_path, monkeypatch, [Task("8B, 1/2", good), Task("other", good)]) == 0
    assert results_of(tmp_path).keys() == {"other"}
    assert claims.held_by(os.getpid()) == ["8B, 1/2"]
    claims.release("8B, 1/2")
    assert claims.held_by(os.getpid()) == []


def test_a_task_that_fails_is_the_only_one_unless_the_device_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is recorded; on a broken device another process continues."""

    def fail() -> dict[str, Any]:
        return {"never": 1 / 0}

    tasks = [Task("bad", fail), Task("behind", good)]
    monkeypatch.setattr(working, "is_broken", lambda _place: False)
    assert worked(tmp_path / "one", monkeypatch, tasks) == 0
    assert results_of(tmp_path / "one")["bad"]["error"] == "ZeroDivisionError: division by zero"
    assert results_of(tmp_path / "one").keys() == {"bad", "behind"}
    monkeypatch.setattr(working, "is_broken", lambda _place: True)
    assert worked(tmp_path / "two", monkeypatch, tasks) == BROKEN
    assert results_of(tmp_path / "two").keys() == {"bad"}


def results_of(folder: Path) -> dict[str, Any]:
    """Return the results of the tasks of `worked`."""
    return Results(folder / "results").read().get("part", {})


def test_all_parts_fit_into_ten_minutes() -> None:
    """Parts that run at the same time count once, and each is a module with tasks."""
    groups = list(grouped(PARTS))
    assert [part.name for part in groups[1]] == ["accuracy", "rows"]
    assert sum(max(part.seconds for part in group) for group in groups) <= SECONDS
    assert all((ROOT / f"{part.path.replace('.', '/')}.py").is_file() for part in [*PARTS, *EXTRA])


@pytest.mark.long
def test_parts_need_torch_triton_and_transformers_alone() -> None:
    """They can be imported without the other packages that a real run needs."""
    names = [part.path for part in PARTS]
    check = f"""
import sys
from importlib import import_module
from bench.gpu.wheels import needed
missing = {{name.replace("-", "_") for name in needed()}} | {{"av", "soxr"}}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
assert {{"pydantic", "llguidance"}} <= missing
for name in {names!r}:
    import_module(name)
"""
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def test_a_card_is_known_by_its_name() -> None:
    """An H100 says that it has as much memory as an A100."""
    assert card_like("NVIDIA H100 80GB HBM3", 85.0e9).name == "h100"
    assert card_like("NVIDIA L40S", 47.7e9).name == "l40s"
    assert card_like("Another", 150e9).name == "h200"


def test_differences_are_reported_in_units() -> None:
    """The unit is the number's size, or the mean if it is small; a NaN never passes."""
    expected = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    unit = torch.finfo(torch.float16).eps
    near = held([(expected + torch.tensor([2 * unit, 0, 0]), expected)], torch.float16, 4)
    assert near["units_off"] == pytest.approx(2 / (5 / 3) ** 0.5, rel=1e-3)
    assert near["holds"]
    assert not held([(expected * torch.nan, expected)], torch.float16, 4)["holds"]
    assert not held([(expected + 1, expected)], torch.float16, 4)["holds"]


def test_time_is_covered_once() -> None:
    """Overlapping spans count once."""
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([]) == 0


def test_steps_find_their_pages() -> None:
    """Decodes come first; only shared prefixes are on the same pages."""
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


def test_a_report_contains_failures() -> None:
    """It also lists results that missed their bound."""
    attempted = attempt(Task("badly", lambda: {"never": 1 / 0}))
    lines = list(
        report(
            {
                "speed": {
                    WHOLE: {"status": "done", "seconds": 3},
                    "slow": {"share_of_copy": 0.5, "bound": 0.85, "holds": False},
                },
                "rows": {"rows": attempted},
            }
        )
    )
    assert "\n## speed (done, 3 s)" in lines
    assert "\n## rows (cut off)" in lines
    assert "| slow | 50% of a copy, **missed** | 0.85 **missed** |" in lines
    assert any("**failed**: ZeroDivisionError" in line for line in lines)
