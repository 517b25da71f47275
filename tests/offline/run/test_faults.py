"""Every call that a run makes fails in turn: a run without all rows never ends with 0.

Whatever failed, what was finished is kept: the resume computes the other lines and no more.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest

from tests.faults import HANGS, Call, Fault, faults_of, in_process, run_profiled
from tests.offline.given import line
from tests.offline.scripted import ScriptedEngine
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.run_line import run_line
from tidemill.cli.main import exit_status_of, parse
from tidemill.engine_process import replicas
from tidemill.engine_process.frames import Row
from tidemill.offline.files import kept_rows, row_writer, spool
from tidemill.offline.run import feed, job, progress
from tidemill.offline.run import run as run_module
from tidemill.offline.run.job import run_job
from tidemill.offline.run.replicas import EngineReplicas
from tidemill.offline.run.run_flags import options_from
from tidemill.protocol.contract import EngineInfo, EngineStats, Reply, Usage

FOLDERS: Final = (
    *("offline/run", "offline/files", "batch/file", "batch/table", "batch/result_", "offline/plan"),
    *("protocol/in_flight", "protocol/callback_failures", "engine_process/replicas"),
)
REPLY: Final = '{"choices" = [{"message" = {"content" = "hi"}, "finish_reason" = "stop"}]}'
NUM_LINES: Final = 20


class CountingEngine(ScriptedEngine):
    """Scripted engine that adds a byte to a file for each request that it has answered."""

    def __init__(self, counter: Path) -> None:
        super().__init__()
        self._fd = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer and count."""
        try:
            reply = await super().respond(url, body, request_id, created)
        except ValueError:
            os.write(self._fd, b".")
            raise
        os.write(self._fd, b".")
        return reply


class Client:
    """Client of a replica's engine that is in this process."""

    stats = EngineStats()
    death: str | None = None

    def __init__(self, engine: CountingEngine) -> None:
        self._engine = engine

    async def start(self) -> EngineInfo:
        """Return the engine's info."""
        return self._engine.info()

    async def fetch_row(self, number: int, created: int, data: bytes) -> Row:
        """Return the row of a line."""
        answered = await run_line(RawLine(number, data), self._engine, created=created)
        return Row(0, answered.is_success, answered.usage or Usage(), answered.row)

    async def close(self) -> None:
        """Do nothing."""


def write_requests(folder: Path) -> None:
    """Write lines that wait, fail, are malformed, and one that is parsed in a thread."""
    bodies: list[dict[str, Any]] = [{"say": f"s{number}"} for number in range(NUM_LINES)]
    bodies[3]["wait"], bodies[9]["wait"], bodies[10]["wait"] = 0.02, 0.01, 0.002
    bodies[5], bodies[14] = {"status": 400}, {"raise": "x"}
    bodies[12]["pad"] = "x" * 110_000
    lines = [line(str(number), **body) for number, body in enumerate(bodies)]
    lines[7] = '{"custom_id": "7"'
    path = folder / "in.jsonl"
    path.write_text("".join(f"{one}\n" for one in lines))
    os.utime(path, (1, 1_700_000_000))


def write_started(folder: Path) -> None:
    """Write requests, the first rows of their output, and a spool with later ones."""
    write_requests(folder)
    assert CHAINS["file"].run(folder)[0] == 0
    data = (folder / "out").read_bytes().splitlines(keepends=True)
    (folder / "out").write_bytes(b"".join(data[:4]))
    spooled = [b"%d\t%s" % (number, data[number - 1]) for number in (6, 16, 11, 15)]
    (folder / "out.spool").write_bytes(b"".join(spooled))
    (folder / "count").unlink()


def write_failed(folder: Path) -> None:
    """Write requests and a complete output of which two rows have failed in the engine."""
    write_requests(folder)
    assert CHAINS["file"].run(folder)[0] == 0
    (folder / "count").unlink()


def write_table(folder: Path) -> None:
    """Write a table and its recipe."""
    rows = "".join(f"{number},text {number}\n" for number in range(NUM_LINES))
    (folder / "in.csv").write_text(f"id,text\n{rows}")
    recipe = f"prompt = '{{{{ text }}}}'\nid = 'id'\nparams.reply = {REPLY}\n"
    (folder / "in.recipe.toml").write_text(recipe)


def ids_in(*names: str) -> Callable[[Path], list[str] | None]:
    """Return a function that reads the IDs of rows of one file, or all of several files, sorted."""

    def read(folder: Path) -> list[str] | None:
        if not (folder / names[0]).exists():
            return None
        found = [_ids(folder / name) for name in names if (folder / name).exists()]
        for one in found[1:]:
            assert one == sorted(one, key=int)
        return found[0] if len(names) == 1 else sorted(chain(*found), key=int)

    return read


def _ids(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        return [str(one) for one in pq.read_table(path).column("id").to_pylist()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [row["id"] for row in csv.DictReader(file)]
    rows = path.read_bytes().split(b"\n")
    return [json.loads(row)["custom_id"] or "7" for row in rows[:-1]]


def marked_ids(folder: Path) -> list[str] | None:
    """Return the IDs of the rows of a shard that has its mark."""
    return ids_in("out.1-of-2")(folder) if (folder / "out.1-of-2.done").exists() else None


@dataclass(frozen=True)
class Chain:
    """A kind of run: `prepare` makes its files, `flags` start it, and with `more` it is resumed.

    `ids` returns the IDs of its rows, None without a complete output.
    """

    prepare: Callable[[Path], None]
    flags: tuple[str, ...]
    ids: Callable[[Path], list[str] | None]
    more: tuple[str, ...] = ("--resume",)
    num_engines: int = 1
    max_lost: int = 2  # the request that failed, and one that was in a thread

    def run(
        self,
        folder: Path,
        fault: Fault | None = None,
        *,
        is_resumed: bool = False,
        is_profiled: bool = False,
    ) -> tuple[int, Counter[Call]]:
        """Run the command in a folder; return its exit status and its calls."""
        flags = (*self.flags, *(self.more if is_resumed else ()))
        with chdir(folder):
            options = options_from(parse(["run", "--model", "m", "--no-card", *flags]))
            engine = CountingEngine(folder / "count")

            def work() -> int:
                with self._replicated(engine):
                    return exit_status_of(lambda: run_job(options, load=lambda *_, **__: engine))

            return run_profiled(work, FOLDERS, fault) if is_profiled else (work(), Counter())

    @contextmanager
    def _replicated(self, engine: CountingEngine) -> Iterator[None]:
        """Have the number of engines, all of them in this process."""

        @contextmanager
        def make(*given: Any) -> Iterator[EngineReplicas]:
            commands = [["engine"]] * self.num_engines
            yield EngineReplicas(commands, created=given[-1], home=lambda place: place)

        with (
            patch.object(job, "num_engines", lambda _: self.num_engines),
            patch.object(job, "replicas", make),
            patch.object(replicas, "EngineClient", lambda *_, **__: Client(engine)),
        ):
            yield


PLAIN: Final = ("-i", "in.jsonl", "-o", "out", "--on-invalid-line", "skip")
CHAINS: Final = {
    "file": Chain(write_requests, PLAIN, ids_in("out")),
    "errors": Chain(write_requests, (*PLAIN, "-e", "bad"), ids_in("out", "bad")),
    "resume": Chain(write_started, (*PLAIN, "--resume"), ids_in("out"), ()),
    "retry": Chain(write_failed, (*PLAIN, "--resume", "--retry-failed"), ids_in("out"), ()),
    "shard": Chain(write_requests, (*PLAIN, "--shard", "1/2"), marked_ids),
    "csv": Chain(write_table, ("-i", "in.csv", "-o", "out.csv"), ids_in("out.csv")),
    "parquet": Chain(write_table, ("-i", "in.csv", "-o", "out.parquet"), ids_in("out.parquet")),
    # Rows may be on their way from an engine to the run.
    "replicas": Chain(write_requests, PLAIN, ids_in("out"), num_engines=2, max_lost=9),
    "reuse": Chain(write_requests, (*PLAIN, "--reuse", "kept"), ids_in("out")),
}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writes, flushes and reports of a small run as many as those of a large one."""
    for module in (kept_rows, row_writer, run_module):
        monkeypatch.setattr(module, "ROWS_PER_WRITE", 3)
    monkeypatch.setattr(spool, "_BUFFER_BYTES", 400)
    monkeypatch.setattr(spool, "_MAX_STALE_BYTES", 400)
    monkeypatch.setattr(feed, "FLUSH_SECONDS", 0.003)
    monkeypatch.setattr(feed, "_LINES_PER_TURN", 4)
    monkeypatch.setattr(progress.LineReporter, "seconds", 0.003)


def count_of(folder: Path) -> int:
    """Return how many requests the engine has answered in this folder, and start over."""
    path = folder / "count"
    size = path.stat().st_size if path.exists() else 0
    path.unlink(missing_ok=True)
    return size


class FaultyRuns:
    """Runs of a chain with faults, each in a separate folder."""

    def __init__(self, chain: Chain, folder: Path) -> None:
        self._chain = chain
        self._folders: Iterator[Path] = (folder / str(number) for number in range(10**6))
        chain.run(self._new_folder())  # imports in this process what is imported late
        whole = self._new_folder()
        status, counts = chain.run(whole, is_profiled=True)
        assert status == 0
        # The function that turns exceptions into a sentence cannot do so for its own start and end.
        self.counts = Counter({call: counts[call] for call in counts if call.function != "run_job"})
        ids = chain.ids(whole)
        assert ids is not None
        self._ids = ids
        self._num_requests = count_of(whole)

    def _new_folder(self) -> Path:
        folder = next(self._folders)
        folder.mkdir()
        self._chain.prepare(folder)
        return folder

    def failure_of(self, fault: Fault) -> str | None:
        """Run with a fault, resume, and return what is wrong, None for nothing."""
        chain, folder = self._chain, self._new_folder()
        stderr = folder / "stderr"
        status = in_process(lambda: chain.run(folder, fault, is_profiled=True)[0], stderr)
        words = stderr.read_text()
        if status == HANGS:
            return f"hangs: {words}"
        if "Traceback" in words:
            return f"{status}: {words}"
        if status == 0:
            return None if chain.ids(folder) == self._ids else f"0 without all rows: {words}"
        answered = count_of(folder)
        resumed = in_process(lambda: chain.run(folder, is_resumed=True)[0], stderr)
        if resumed != 0:
            return f"{status}, then {resumed}: {words}\nresumed: {stderr.read_text()}"
        if chain.ids(folder) != self._ids:
            return f"{status}, and the resume has other rows: {words}"
        if (num_lost := answered + count_of(folder) - self._num_requests) > chain.max_lost:
            return f"{status}, and {num_lost} finished rows were lost: {words}"
        return None


def check(name: str, folder: Path, *, one_in: int) -> None:
    """Assert that some of all faults of a chain cost no finished row, and never end with 0."""
    runs = FaultyRuns(CHAINS[name], folder)
    faults = [*faults_of(runs.counts, one_in=one_in)]
    found = [(fault, words) for fault in faults if (words := runs.failure_of(fault))]
    assert not found, "\n\n".join(f"{fault}: {words}" for fault, words in found)


@pytest.mark.parametrize("name", CHAINS)
def test_a_call_that_fails_costs_no_finished_row(name: str, tmp_path: Path) -> None:
    """Each fault costs a feature or ends the run with a status, a sentence and a way to go on."""
    check(name, tmp_path, one_in=293)


@pytest.mark.long
@pytest.mark.parametrize("name", CHAINS)
def test_every_call_may_fail(name: str, tmp_path: Path) -> None:
    """The same at the first, a middle and the last call of each function, at its start and end."""
    check(name, tmp_path, one_in=1)
