"""Interruptions: whatever ends a run, the file can be completed to that of an unbroken one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line, rows, wait_for_rows
from tidemill.offline.console.errors import EngineFailed, Refused

Write = Callable[..., Path]
Spawn = Callable[..., Any]
STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def wait_for_words(process: subprocess.Popen[str], words: str) -> None:
    """Return once the process has printed these words."""
    assert process.stderr is not None
    for printed in process.stderr:
        if words in printed:
            return
    raise AssertionError(f"it never printed {words!r}")


@pytest.mark.parametrize("stop", STOPS)
def test_a_signal_in_the_middle_leaves_finished_rows_and_a_way_to_go_on(
    spawn: Spawn, run: Any, write_input: Write, tmp_path: Path, stop: tuple[int, int]
) -> None:
    """Rows in order are written, the next command is printed, and it completes the file."""
    number, status = stop
    waits = [0, 0, 0, 60, 0, 0]
    source = write_input(*(line(str(n), wait=wait) for n, wait in enumerate(waits)))
    out = tmp_path / "out"
    process = spawn("-i", source, "-o", out)
    wait_for_rows(out, 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status
    assert f"stopped with 5 of 6 rows finished. The finished rows are in {out}; to keep" in err
    assert "to keep them and run the rest" in err
    assert f"2 finished rows waiting for earlier rows are in {out}.spool" in err
    assert "Traceback" not in err
    assert [row["custom_id"] for row in rows(out)] == ["0", "1", "2"]
    run.speed = 1_000
    assert run("-i", source, "-o", out, "--resume") == 0
    assert run.engine.num_requests == 1
    assert run("-i", source, "-o", tmp_path / "whole") == 0
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out", "whole"]


@pytest.mark.parametrize(("number", "status"), STOPS)
def test_a_signal_while_the_model_loads_leaves_the_output_alone(
    spawn: Spawn, write_input: Write, tmp_path: Path, number: int, status: int
) -> None:
    """It ends at once and says that nothing was written."""
    out = tmp_path / "out"
    out.write_text("precious\n")
    flags = ["-i", write_input(line("a")), "-o", out, "--force"]
    process = spawn(*flags, options=["--load-seconds", "60"])
    wait_for_words(process, "loading m")
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status
    assert err == f"tidemill: stopped by {signal.Signals(number).name}: nothing was written\n"
    assert out.read_text() == "precious\n"


def test_a_signal_while_the_input_comes_in_ends_the_run(spawn: Spawn, tmp_path: Path) -> None:
    """The command does not hang on standard input that never ends."""
    process = spawn("-i", "-", "-o", tmp_path / "out", stdin=subprocess.PIPE)
    wait_for_words(process, "reading standard input")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert not (tmp_path / "out").exists()


def test_a_second_signal_ends_it_at_once(spawn: Spawn, write_input: Write, tmp_path: Path) -> None:
    """An engine that takes a minute to close is not waited for."""
    out = tmp_path / "out"
    source = write_input(line("a"), line("b", wait=60))
    process = spawn("-i", source, "-o", out, options=["--close-seconds", "60"])
    wait_for_rows(out, 1)
    process.send_signal(signal.SIGINT)
    wait_for_words(process, "stopped with 1 of 2 rows")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143


def test_rows_for_a_url_are_kept_when_a_signal_comes(
    spawn: Spawn,
    run: Any,
    server: Any,
    write_input: Write,
    tmp_dir: Path,
) -> None:
    """Nothing is uploaded; the rows so far can be resumed as a file."""
    source = write_input(line("a"), line("b", wait=60))
    flags = ["--output-tmp-dir", tmp_dir, "--max-inflight", "1"]
    process = spawn("-i", source, "-o", f"{server.url}/out?key=secret-of-mine", *flags)
    wait_for_words(process, "model loaded")
    [kept] = tmp_dir.glob("*.jsonl")
    wait_for_rows(kept, 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"to run the rest: -o {kept} --resume" in err
    assert "secret" not in err
    assert server.received == []
    run.speed = 1_000
    assert run("-i", source, "-o", kept, "--resume") == 0
    assert [row["custom_id"] for row in rows(kept)] == ["a", "b"]


def test_a_killed_run_is_completed_to_the_bytes_of_an_unbroken_one(
    spawn: Spawn, run: Any, write_input: Write, tmp_path: Path
) -> None:
    """kill -9 twice, each time at another row; two files, failures and a malformed line."""
    lines = [
        line(str(n), wait=0.005 * (n * 7 % 5), **({"status": 400} if n % 6 == 1 else {}))
        for n in range(120)
    ]
    lines[50] = "{"
    source = write_input(*lines)
    flags = ["-i", source, "--on-invalid-line", "skip", "--max-inflight", "4"]
    whole = [tmp_path / "whole", tmp_path / "whole-errors"]
    assert run(*flags, "-o", whole[0], "-e", whole[1]) == 0
    files = [tmp_path / "out", tmp_path / "errors"]
    flags += ["-o", files[0], "-e", files[1]]
    for rows_before_kill in (10, 40):
        process = spawn(*flags, "--resume")
        wait_for_rows(files[0], rows_before_kill)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert files[0].read_bytes() != whole[0].read_bytes()
    assert run(*flags, "--resume") == 0
    assert run.engine.num_requests < 100
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in whole]


def test_rows_of_a_stream_are_whole_after_a_signal(spawn: Spawn, write_input: Write) -> None:
    """Standard output ends with a complete row."""
    process = spawn("-i", write_input(line("a"), line("b", wait=60)), "-o", "-")
    assert process.stdout.readline().endswith("\n")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (143, "")
    assert "only an output file can be resumed" in err


def test_rows_behind_a_slow_line_outlive_a_kill(
    spawn: Spawn, run: Any, write_input: Write, tmp_path: Path
) -> None:
    """They are spooled while the run goes on, through one kill after another, and run once."""
    bodies: list[dict[str, Any]] = [{} for _ in range(12)]
    for place in (0, 5, 9):
        bodies[place] = {"wait": 60}
    bodies[3] = {"status": 400}
    source, out = write_input(*(line(str(n), **body) for n, body in enumerate(bodies))), "out"
    flags = ["-i", source, "-o", tmp_path / out, "-e", tmp_path / "errors"]
    for num_spooled, inflight in ((2, 2), (9, 8)):
        process = spawn(
            *flags, "--resume", "--max-inflight", inflight, options=["--flush-seconds", "0.02"]
        )
        wait_for_rows(tmp_path / "out.spool", num_spooled)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert (tmp_path / out).read_bytes() == b""
    run.speed = 1_000
    assert run(*flags, "--resume") == 0
    assert run.engine.num_requests == 3
    whole = [tmp_path / "whole", tmp_path / "whole-errors"]
    assert run("-i", source, "-o", whole[0], "-e", whole[1]) == 0
    assert [(tmp_path / name).read_bytes() for name in (out, "errors")] == [
        path.read_bytes() for path in whole
    ]
    assert not (tmp_path / "out.spool").exists()


def test_rows_that_are_spooled_are_not_written_over(
    spawn: Spawn, run: Any, write_input: Write, tmp_path: Path
) -> None:
    """A run that would start over is refused without --force."""
    source, out = write_input(line("a", wait=60), line("b")), tmp_path / "out"
    process = spawn("-i", source, "-o", out, options=["--flush-seconds", "0.02"])
    wait_for_rows(tmp_path / "out.spool", 1)
    process.kill()
    process.wait()
    run.speed = 1_000
    with pytest.raises(
        Refused, match=r"out\.spool contains finished rows .* pass --resume to keep them"
    ):
        run("-i", source, "-o", out)
    assert run("-i", source, "-o", out, "--force") == 0
    assert run.engine.num_requests == 2
    assert not (tmp_path / "out.spool").exists()


def test_an_engine_that_dies_leaves_what_it_has_answered(
    run: Any, write_input: Write, tmp_path: Path
) -> None:
    """Rows after the line at which it crashed are included."""
    source = write_input(line("a"), line("b", name="b", wait=0.2), line("c"), line("d"))
    flags = ["-i", source, "-o", tmp_path / "out"]
    run.dies_at = "b"
    with pytest.raises(EngineFailed, match="2 finished rows waiting"):
        run(*flags)
    run.dies_at = None
    assert run(*flags, "--resume") == 0
    assert run.engine.num_requests == 1
    assert [row["custom_id"] for row in rows(tmp_path / "out")] == ["a", "b", "c", "d"]
