"""`tidemill run` on a device that fails: no line has a row of it, and a resume has all rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from torch import Tensor

from tests.offline.given import line, rows
from tidemill.cli.main import main
from tidemill.engine.loop.runner import Runner
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.offline.files.paths import spool_path

NUM_LINES = 60


def break_from(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let every step fail from one on."""
    run, numbers = Runner.run, count(1)

    def failing(own: Runner, plan: StepPlan) -> Tensor:
        if next(numbers) >= number:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return run(own, plan)

    monkeypatch.setattr(Runner, "run", failing)


@pytest.fixture(name="source")
def fixture_source(write_input: Callable[..., Path]) -> Path:
    """Return a file of many short lines."""
    lines = (
        line(
            f"{i}",
            model="tidemill-demo",
            messages=[{"role": "user", "content": f"What is {i} and {i}?"}],
            max_tokens=2 + i % 5,
            temperature=0,
        )
        for i in range(NUM_LINES)
    )
    return write_input(*lines)


def given(source: Path, out: Path, *flags: str) -> list[str]:
    """Return the command that runs a file."""
    own = ["--max-num-seqs", "16", "--dtype", "float32", "--device", "cpu"]
    return ["run", "-i", str(source), "-o", str(out), *own, *flags]


def test_a_device_that_fails_for_good_ends_the_run_and_fails_no_line(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit status shows it, written rows are good, and a resume runs the remaining lines."""
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        break_from(patched, 8)
        assert main(given(source, out)) == 4
    words = capsys.readouterr().err
    assert "the engine has stopped: the engine stopped: a step of one token fails as well" in words
    assert "illegal memory access" in words
    assert "--resume" in words
    written = rows(out)
    spooled = spool_path(out).read_bytes().count(b"\n")
    assert 0 < len(written) + spooled < NUM_LINES
    assert main(given(source, out, "--resume")) == 0
    assert rows(out)[: len(written)] == written
    assert [row["custom_id"] for row in rows(out)] == [f"{i}" for i in range(NUM_LINES)]
    assert {row["response"]["status_code"] for row in rows(out)} == {200}
