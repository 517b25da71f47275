"""`tidemill run` with an engine that hangs: it ends with status 4, and a resume has all rows."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.long_parameters import with_long
from tests.offline.given import line, rows, wait_for_rows
from tidemill import demo
from tidemill.cli.main import main
from tidemill.engine.loop.runner import Runner
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.offline.console.errors import STACKS, EngineLost
from tidemill.offline.engine import watched_engine
from tidemill.offline.files.paths import spool_path
from tidemill.offline.run import job

Write = Callable[..., Path]
Spawn = Callable[..., Any]
SOON = ("--stall-seconds", "0.5")
NUM_LINES = 40
ROOT = Path(__file__).parents[3]
WORDS = "the engine has stopped: no step has finished for"


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """Return an event that ends all hanging steps, set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def hang_at(monkeypatch: pytest.MonkeyPatch, number: int, let_go: threading.Event) -> None:
    """Let a step of the engine, and all after it, wait for the event."""
    run, numbers = Runner.run, count(1)

    def hanging(own: Runner, plan: StepPlan) -> Any:
        if next(numbers) >= number:
            let_go.wait()
        return run(own, plan)

    monkeypatch.setattr(Runner, "run", hanging)


def question(number: int) -> str:
    """Return a line for the demo model."""
    return line(
        f"{number}",
        model="tidemill-demo",
        messages=[{"role": "user", "content": f"What is {number} and {number}?"}],
        max_tokens=2 + number % 5,
        temperature=0,
    )


def source_of(kind: str, folder: Path) -> tuple[Path, list[str]]:
    """Return an input of this kind for a scripted engine, and further flags."""
    if kind != "table":
        path = folder / "in.jsonl"
        path.write_text("".join(f"{line(str(n))}\n" for n in range(NUM_LINES)))
        return path, ["--shard", "1/2"] if kind == "shard" else []
    path = folder / "table.parquet"
    pq.write_table(pa.table({"text": [f"t{n}" for n in range(NUM_LINES)]}), path)
    recipe = folder / "table.recipe.toml"
    reply = '{choices = [{message = {content = "hi"}, finish_reason = "stop"}]}'
    recipe.write_text(f"prompt = '{{{{ text }}}}'\nparams.reply = {reply}\n")
    return path, []


def test_a_step_that_hangs_ends_the_run_with_4(
    write_input: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    let_go: threading.Event,
) -> None:
    """The error says for how long and how to resume; the stacks of all threads follow it."""
    source, out = write_input(*map(question, range(NUM_LINES))), tmp_path / "out.jsonl"
    command = ["run", "-i", str(source), "-o", str(out), "--max-num-seqs", "8"]
    command += ["--dtype", "float32", "--device", "cpu"]
    with monkeypatch.context() as patched:
        hang_at(patched, 12, let_go)
        assert main([*command, "--stall-seconds", "2"]) == 4
    sentence, stacks = capfd.readouterr().err.split(STACKS)
    assert f"{WORDS} 2 s, with " in sentence
    assert "in the engine (--stall-seconds). The finished rows are in" in sentence
    assert (
        "to keep them and run the rest, run the same command with --resume"
        in sentence.splitlines()[-1]
    )
    assert "in hanging" in stacks
    written = rows(out)
    assert len(written) + spool_path(out).read_bytes().count(b"\n") < NUM_LINES
    assert main([*command, "--resume"]) == 0
    assert rows(out)[: len(written)] == written
    assert [row["custom_id"] for row in rows(out)] == [f"{n}" for n in range(NUM_LINES)]
    assert {row["response"]["status_code"] for row in rows(out)} == {200}


@pytest.mark.parametrize("kind", ["lines", "table", "shard"])
def test_rows_that_were_finished_before_a_hang_are_kept(
    run: Any, tmp_path: Path, kind: str
) -> None:
    """A resume runs the other lines only, and its output is that of an unbroken run."""
    source, flags = source_of(kind, tmp_path)
    suffix = source.suffix
    given = ["-i", source, *flags]
    run.hangs_after = 7
    with pytest.raises(EngineLost, match=r"no step has finished for 0\.5 s.*--resume") as caught:
        run(*given, "-o", tmp_path / f"out{suffix}", "--max-inflight", "2", *SOON)
    assert caught.value.exit_status == 4
    assert caught.value.details.startswith(STACKS)
    run.hangs_after = NUM_LINES
    assert run(*given, "-o", tmp_path / f"out{suffix}", "--resume") == 0
    num_resumed = run.engine.num_requests
    assert run(*given, "-o", tmp_path / f"whole{suffix}") == 0
    assert num_resumed == run.engine.num_requests - 7
    shard = ".1-of-2" if kind == "shard" else ""
    broken, whole = (tmp_path / f"{name}{suffix}{shard}" for name in ("out", "whole"))
    assert broken.read_bytes() == whole.read_bytes()


def test_a_run_whose_event_loop_hangs_is_ended(
    spawn: Spawn, write_input: Write, tmp_path: Path
) -> None:
    """By the thread that watches: nothing else can, and finished rows are in the file."""
    source, out = write_input(line("a"), line("b", block=600)), tmp_path / "out"
    flags = ["-i", source, "-o", out, "--max-inflight", "1"]
    process = spawn(*flags, "--stall-seconds", "0.2", options=["--end-seconds", "0.1"])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4
    sentence, stacks = err.split(STACKS)
    assert "the engine has stopped: its event loop has been blocked for 1 s" in sentence
    assert "to keep them and run the rest" in sentence
    assert "in respond" in stacks
    assert [row["custom_id"] for row in rows(out)] == ["a"]


@pytest.mark.parametrize("is_interrupted", with_long([False], [True]))
def test_a_call_that_stops_all_of_python_is_ended(
    spawn: Spawn, write_input: Write, tmp_path: Path, *, is_interrupted: bool
) -> None:
    """By a second process, also at Ctrl-C, with the same sentence and the stacks of all threads."""
    source, out = write_input(line("a"), line("b", lock=True)), tmp_path / "out"
    limit = "600" if is_interrupted else "2"
    flags = ["-i", source, "-o", out, "--max-inflight", "1", "--stall-seconds", limit]
    process = spawn(*flags, options=["--guard"], start_new_session=True)
    wait_for_rows(out, 1)
    if is_interrupted:
        time.sleep(1)  # until the call has begun
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert "the engine has stopped: native code has held Python's interpreter lock for" in err
    assert f"The finished rows are in {out}; to keep them and run the rest, run the same" in err
    assert "in respond" in err.partition("--resume")[2]
    assert [row["custom_id"] for row in rows(out)] == ["a"]


def test_a_signal_ends_a_run_that_hangs(spawn: Spawn, write_input: Write, tmp_path: Path) -> None:
    """The lines that hang are given up, and the finished rows are kept."""
    source, out = write_input(line("a"), line("b", hang=True)), tmp_path / "out"
    process = spawn("-i", source, "-o", out, options=["--guard"])
    wait_for_rows(out, 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped with 1 of 2 rows finished" in err


def test_an_engine_that_does_not_close_keeps_no_run_from_its_end(
    run: Any,
    write_input: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    let_go: threading.Event,
) -> None:
    """All rows are there by then: the run is complete, and the log says that it did not wait."""
    messages: list[str] = []
    monkeypatch.setattr(watched_engine, "log", messages.append)
    monkeypatch.setattr(watched_engine, "print_details", messages.append)
    monkeypatch.setattr(watched_engine, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("tests.offline.scripted.ScriptedEngine.close", lambda _: let_go.wait())
    out = tmp_path / "out"
    assert run("-i", write_input(line("a"), line("b")), "-o", out) == 0
    assert [row["custom_id"] for row in rows(out)] == ["a", "b"]
    [sentence, stacks] = messages
    assert sentence == "the engine has not closed after 0.1 s: exiting without it"
    assert stacks.startswith(STACKS)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine has a core")
def test_an_engine_of_several_that_hangs_is_started_again(
    write_input: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All other lines have their rows, and the log has the reason and the stacks of the engine."""
    command = [sys.executable, str(ROOT / "tests/engine_process/scripted_engine.py")]
    monkeypatch.setattr(job, "engine_command", lambda _: list(command))
    bodies = [{"wait": 0.05}] * 4
    bodies[2] = {"hang": True}
    source = write_input(*(line(str(n), **body) for n, body in enumerate(bodies)))
    out = tmp_path / "out"
    flags = ["--model", str(demo.MODEL_PATH), "--device", "cpu", "-dp", "2"]
    flags += ["--stall-seconds", "2"]
    assert main(["run", "-i", str(source), "-o", str(out), "--no-card", *flags]) == 0
    written = rows(out)
    assert len(written) == len(bodies)
    assert [n for n, row in enumerate(written) if row["error"] is not None] == [2]
    err = capfd.readouterr().err
    assert re.search(r"engine [12] exited \(stalled: .* in the engine\): restarting it", err)
    assert "most recent call first" in err
