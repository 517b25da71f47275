"""Unexpected failures of a run: no row is lost, and a run without all rows does not end with 0."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.offline.given import line, rows
from tidemill.batch.file.lines import RawLine
from tidemill.cli.main import exit_status_of
from tidemill.engine_process import replicas as replicas_module
from tidemill.engine_process.client import EngineDied
from tidemill.offline.console.errors import CliError
from tidemill.offline.files import output
from tidemill.offline.files.input_file import PlacedLine
from tidemill.offline.plan.plan import Plan
from tidemill.offline.run import feed
from tidemill.offline.run.replicas import EngineReplicas
from tidemill.offline.run.tally import Tally
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats

Write = Callable[..., Path]


def ids(path: Path) -> list[str]:
    """Return the custom IDs of the rows of a file."""
    return [row["custom_id"] for row in rows(path)]


def spooled(out: Path) -> list[str]:
    """Return the custom IDs of the rows in the spool of an output."""
    path = Path(f"{out}.spool")
    records = path.read_bytes().splitlines() if path.exists() else []
    return [json.loads(record.split(b"\t", 1)[1])["custom_id"] for record in records]


def outcome(run: Any, *arguments: object) -> tuple[int, str]:
    """Return the exit status of a run and its message."""
    try:
        return run(*arguments), ""
    except CliError as exc:
        return exc.exit_status, str(exc)


def fails_once_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Make one call of a method raise MemoryError, and let all others through."""
    original, calls = getattr(owner, name), iter(range(10**6))

    def method(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise MemoryError
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def test_lines_without_a_thread_to_parse_them_in_end_the_run(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that refuses threads loses no row, and the resume completes the file."""
    texts = ["x" * 200_000 if number % 20 == 19 else "short" for number in range(60)]
    source = write_input(*(line(str(n), say=text) for n, text in enumerate(texts)))
    out = tmp_path / "out"
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("asyncio_"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        status, words = outcome(run, "-i", source, "-o", out)
    assert status == 6
    assert words.startswith(
        "the run failed unexpectedly (RuntimeError: can't start new thread, at "
    )
    assert "to keep them and run the rest, run the same command with --resume" in words
    kept = [*ids(out), *spooled(out)]
    assert len(kept) == len({*kept}) >= 19
    assert run("-i", source, "-o", out, "--resume") == 0
    assert run.engine.num_requests == 60 - len(kept)
    assert ids(out) == [str(number) for number in range(60)]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((feed.Feed, name) for name in ("_work", "_end", "_admit", "_write", "_wake")),
        *((Tally, "count_all"), (Plan, "finish"), (Plan, "_start"), (output.LocalFile, "write")),
    ],
)
@pytest.mark.parametrize("call", [0, 7])
def test_a_failing_call_keeps_all_finished_rows(  # noqa: PLR0917 - fixtures and cases
    run: Any,
    write_input: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
) -> None:
    """The message is one sentence and the way to go on; the resume computes what has no row."""
    source, out = write_input(*(line(str(n)) for n in range(20))), tmp_path / "out"
    with monkeypatch.context() as failing:
        fails_once_at(failing, owner, name, call)
        status, words = outcome(run, "-i", source, "-o", out)
    if status == 0:
        assert ids(out) == [str(number) for number in range(20)]
        return
    assert status == 6
    assert "MemoryError" in words
    assert f"The finished rows are in {out}; to keep them and run the rest, run" in words
    kept, run.engine = {*ids(out), *spooled(out)}, None
    assert run("-i", source, "-o", out, "--resume") == 0
    assert ids(out) == [str(number) for number in range(20)]
    assert (0 if run.engine is None else run.engine.num_requests) == 20 - len(kept)
    assert not Path(f"{out}.spool").exists()


def test_a_row_that_the_output_lacks_is_not_a_success(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer counts its rows itself, whatever the feed reports."""
    source, out = write_input(*(line(str(n)) for n in range(5))), tmp_path / "out"
    original = feed.Feed._write

    def lose_one(self: Any) -> bool:
        self._finished = [one for one in self._finished if one[0].place != 2]
        return original(self)

    with monkeypatch.context() as losing:
        losing.setattr(feed.Feed, "_write", lose_one)
        status, words = outcome(run, "-i", source, "-o", out)
    assert status == 6
    assert words.startswith("the output has 2 of 5 rows. The finished rows are in")
    assert "2 finished rows waiting for earlier rows are in" in words
    assert run("-i", source, "-o", out, "--resume") == 0
    assert run.engine.num_requests == 1
    assert ids(out) == list("01234")


def test_steps_that_no_row_depends_on_are_notes(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The card of a run may fail, its rows are complete."""
    run.has_card = True
    monkeypatch.setattr("tidemill.offline.run.run_card.card_of", lambda *_: 1 / 0)
    out = tmp_path / "out"
    assert run("-i", write_input(line("a")), "-o", out) == 0
    assert ids(out) == ["a"]
    assert "note: the run card cannot be written (ZeroDivisionError" in capsys.readouterr().err


def test_the_traceback_is_printed_on_request(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Users see one sentence; TIDEMILL_TRACEBACK adds the traceback for a report of the bug."""
    source = write_input(line("a"))
    fails_once_at(monkeypatch, feed.Feed, "_admit", 0)
    assert exit_status_of(lambda: run("-i", source, "-o", tmp_path / "out")) == 6
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("TIDEMILL_TRACEBACK", "1")
    fails_once_at(monkeypatch, feed.Feed, "_admit", 0)
    assert exit_status_of(lambda: run("-i", source, "-o", tmp_path / "out", "--force")) == 6
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert printed.splitlines()[-1].startswith("tidemill: the run failed unexpectedly (MemoryError")


def test_an_upload_without_all_rows_is_not_sent(
    run: Any, server: Any, write_input: Write, tmp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are kept where the message says, and the resume there completes them."""
    source = write_input(*(line(str(n)) for n in range(20)))
    with monkeypatch.context() as failing:
        fails_once_at(failing, Plan, "finish", 0)
        flags = ["--output-tmp-dir", tmp_dir]
        status, words = outcome(run, "-i", source, "-o", f"{server.url}/out", *flags)
    assert status == 6
    assert server.received == []
    [rest] = re.findall(r"to run the rest: -o (\S+) --resume", words)
    run.engine = None
    assert run("-i", source, "-o", rest, "--resume") == 0
    assert ids(Path(rest)) == [str(number) for number in range(20)]


@pytest.mark.parametrize("reason", ["no engine is left", "requests cannot be assigned to engines"])
def test_a_restart_that_fails_ends_the_run(reason: str) -> None:
    """Lines of the last engine do not wait for ever for another."""
    closed = []
    is_assigning = reason.startswith("requests")

    class Client:
        stats = EngineStats()
        death: str | None = None

        async def start(self) -> EngineInfo:
            return EngineInfo("scripted", None, "test", "cpu", 0, 4)

        async def fetch_row(self, *_: object) -> None:
            raise EngineDied("killed")

        async def close(self) -> None:
            if not is_assigning and not closed:
                closed.append(self)
                raise MemoryError

    async def answer() -> None:
        replicas = EngineReplicas([["engine"]], created=0, home=lambda place: place)
        failures = [MemoryError()] if is_assigning else []

        def admit() -> None:
            if failures:
                raise failures.pop()
            replicas._admit()

        replicas._replicas._changed = admit
        async with asyncio.timeout(60), replicas.started():
            await replicas.run_line(PlacedLine(0, RawLine(1, line("a").encode())))

    clients = patch.object(replicas_module, "EngineClient", lambda *_, **__: Client())
    with clients, pytest.raises(EngineError, match=reason):
        asyncio.run(answer())
