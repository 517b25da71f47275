"""Several engines behind one file: who gets a line, what a death costs, and equal rows."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.offline.given import line
from tidemill.batch.file.lines import Overlong, RawLine
from tidemill.batch.file.run_line import LineResult
from tidemill.cli.main import main
from tidemill.engine_process.client import EngineFailed
from tidemill.offline.console.errors import EngineLost, Refused
from tidemill.offline.engine.data_parallel import visible_gpus
from tidemill.offline.files.input_file import PlacedLine
from tidemill.offline.run import job
from tidemill.offline.run.job import num_engines
from tidemill.offline.run.replicas import EngineReplicas
from tidemill.offline.run.run_options import RunOptions
from tidemill.protocol.contract import EngineError

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/engine_process/scripted_engine.py"


def placed(*bodies: dict[str, Any]) -> list[PlacedLine]:
    """Return lines with these bodies, which are scripts for an engine."""
    found = []
    for place, body in enumerate(bodies):
        fields = {"custom_id": str(place), "url": "/v1/x", "body": {"custom_id": str(place)} | body}
        found.append(PlacedLine(place, RawLine(place + 1, json.dumps(fields).encode())))
    return found


def answered(
    lines: Sequence[PlacedLine],
    *engines: Sequence[str],
    home: Callable[[int], int] = lambda place: place,
) -> list[LineResult]:
    """Return the rows of lines that all go at once to engines with these arguments."""

    async def run() -> list[LineResult]:
        commands = [[sys.executable, str(SCRIPT), *arguments] for arguments in engines]
        replicas = EngineReplicas(commands, created=1, home=home)
        async with replicas.started():
            assert replicas.info().max_num_seqs == sum(
                int(arguments[arguments.index("--slots") + 1]) if "--slots" in arguments else 64
                for arguments in engines
            )
            return await asyncio.gather(*map(replicas.run_line, lines))

    return asyncio.run(run())


def ids_of(path: Path) -> list[str]:
    """Return the lines that an engine finished, by its log."""
    notes = [note.split("\t") for note in path.read_text().splitlines()]
    return [name for name, event, _ in notes if event == "finished"]


def test_rows_are_those_of_one_engine() -> None:
    """The lines are good, failing or invalid."""
    lines = placed({}, {"status": 400}, {"raise": "x"}, {})
    lines.append(PlacedLine(4, RawLine(5, b"no json")))
    one, several = answered(lines, []), answered(lines, [], [], [])
    assert several == one
    assert [row.is_success for row in one] == [True, False, False, True, False]
    assert one[1].failure == "The body requested this error."
    long = PlacedLine(5, RawLine(6, b"", Overlong(10, 5, "d" * 24)))
    (row,) = answered([long], [])
    assert "too long: 10 bytes" in str(row.failure)


def test_lines_that_begin_alike_go_to_one_engine(tmp_path: Path) -> None:
    """They do while it has only a little more work than the others."""
    logs = [tmp_path / name for name in "ab"]
    engines = [("--log", str(log), "--slots", "8", "--service-seconds", "0.05") for log in logs]
    answered(placed(*[{}] * 8), *engines, home=lambda place: place // 4)
    first, second = (set(map(int, ids_of(log))) for log in logs)
    assert first | second == set(range(8))
    assert len(first & {0, 1, 2, 3}) >= 3
    answered(placed(*[{}] * 20), *engines, home=lambda _place: 0)
    assert min(len(ids_of(log)) for log in logs) >= 10


def test_an_idle_engine_takes_lines_that_wait_for_another(tmp_path: Path) -> None:
    """The quick one ends up with most of them."""
    quick, slow = tmp_path / "quick", tmp_path / "slow"
    engines = [
        ("--log", str(quick), "--slots", "1", "--service-seconds", "0.001"),
        ("--log", str(slow), "--slots", "1", "--service-seconds", "0.3"),
    ]
    rows = answered(placed(*[{}] * 24), *engines)
    assert all(row.is_success for row in rows)
    assert len(ids_of(slow)) <= 4
    assert sorted(map(int, ids_of(quick) + ids_of(slow))) == list(range(24))


def test_lines_that_end_engines_cost_no_other_line() -> None:
    """Lines next to them have their rows; theirs have their custom ids."""
    bodies: list[dict[str, Any]] = [{"wait": 0.05} for _ in range(6)]
    bodies[2] = bodies[4] = {"die": True}
    rows = answered(placed(*bodies), [], [])
    assert [place for place, row in enumerate(rows) if not row.is_success] == [2, 4]
    for place in (2, 4):
        row = json.loads(rows[place].row)
        assert (row["custom_id"], row["error"]["code"]) == (str(place), "engine_died")


def test_engines_that_keep_ending_end_the_run() -> None:
    """No line is blamed for a broken machine."""
    with pytest.raises(EngineError, match="engines keep exiting"):
        answered(placed({"fail": "the device is gone", "machine": True}), [], [])


def test_an_engine_that_cannot_load_ends_the_run() -> None:
    """The error is the engine's."""
    with pytest.raises(EngineError, match="no weights here"):
        answered(placed({}), [], ["--refuse", "no weights here"])


def test_engines_that_cannot_load_leave_the_output_unchanged(
    run: Any, write_input: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output that `--force` would overwrite is lost only to an engine that can run."""

    class Client:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        async def start(self) -> NoReturn:
            raise EngineFailed("no memory", code="engine_died")

        async def close(self) -> None:
            pass

    @contextmanager
    def replicas(*given: Any) -> Iterator[EngineReplicas]:
        yield EngineReplicas([[], []], created=given[-1], home=int)

    out = tmp_path / "out"
    flags = ["-i", write_input(line("a"), line("b")), "-o", out]
    assert run(*flags) == 0
    before = out.read_bytes()
    monkeypatch.setattr(job, "replicas", replicas)
    monkeypatch.setattr(job, "num_engines", lambda _: 2)
    monkeypatch.setattr("tidemill.engine_process.replicas.EngineClient", Client)
    with pytest.raises(EngineLost, match="no memory"):
        run(*flags, "--force", "-dp", "2")
    assert out.read_bytes() == before


@pytest.mark.long  # with a real model; tests/serve has two engines of one
def test_a_run_has_the_rows_of_one_engine(tmp_path: Path) -> None:
    """With a real model, defaults, and lines that fail."""
    source = tmp_path / "in.jsonl"
    bodies = [{"max_tokens": 3}, {"temperature": 9}, {}, {}, {}]
    source.write_text("".join(line(str(n), **body) + "\n" for n, body in enumerate(bodies)))
    flags = ["--temperature", "0", "--max-tokens", "5", "--dialect", "vllm"]
    for name, more in (("one", []), ("two", ["--data-parallel-size", "2"])):
        assert main(["run", str(source), "-o", str(tmp_path / name), *flags, *more]) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_size_that_the_machine_has_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs are counted in groups of the tensor parallel size; without any, cores are."""

    def replicas_of(gpus: str | None, **given: Any) -> int:
        if gpus is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        return num_engines(RunOptions("in", "out", **given))

    assert replicas_of("0,1,2,3,4", data_parallel_size="auto", tensor_parallel_size=2) == 2
    assert replicas_of("0,1", data_parallel_size=2) == 2
    assert replicas_of("", data_parallel_size="auto") == 1
    assert replicas_of("0", data_parallel_size=1) == 1
    with pytest.raises(Refused, match="needs 4 GPUs, but this machine has 3"):
        replicas_of("0,1,2", data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(Refused, match="cores, but this machine has"):
        replicas_of("0", data_parallel_size=10_000, device="cpu")
    with pytest.raises(Refused, match="cannot be combined with --reuse"):
        replicas_of("0,1", data_parallel_size=2, reuse=Path("x"))
    assert visible_gpus(RunOptions("in", "out", device="cpu")) == ()
