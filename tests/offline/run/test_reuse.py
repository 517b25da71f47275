"""The second run of a file: what is computed again, and what its rows are."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulators import Emulator
from tests.offline.conftest import Runner
from tests.offline.given import line, rows
from tests.server.local.rig import MODEL, lines_of, serving
from tests.server.local.rig import ScriptedEngine as LocalEngine
from tidemill.batch.result_cache import FILE_NAME, ResultCache
from tidemill.batch.result_key import ResultKeys, Scope
from tidemill.demo import MODEL_PATH
from tidemill.offline.console.errors import Refused
from tidemill.offline.files.reused_rows import ReusedRows
from tidemill.offline.run.reuse import Reuse, ReusingResponder, daily_results
from tidemill.protocol.contract import Reply, Usage

Write = Callable[..., Path]


class Twice:
    """Runs files with one folder of results."""

    def __init__(self, run: Any, write_input: Write, folder: Path) -> None:
        self._run, self._write, self.folder = run, write_input, folder
        self.where: object = folder
        self.num_runs = 0

    def __call__(self, *lines: str, flags: tuple[object, ...] = ()) -> tuple[Path, int]:
        """Run a file of these lines; return its rows and the number of requests to the engine."""
        self.num_runs += 1
        out, self._run.engine = self.folder.parent / f"out-{self.num_runs}.jsonl", None
        model = ("--model", MODEL_PATH, "--any-model", "--reuse", self.where)
        self._run("-i", self._write(*lines), "-o", out, *model, *flags)
        return out, 0 if self._run.engine is None else self._run.engine.num_requests


@pytest.fixture
def twice(run: Any, write_input: Write, tmp_path: Path) -> Twice:
    """Return what runs files."""
    return Twice(run, write_input, tmp_path / "kept")


def greedy(name: str, **body: Any) -> str:
    """Return a line whose answer is determined."""
    return line(name, temperature=0, say=f"to {name}", **body)


def test_a_second_run_computes_nothing_and_loads_no_model(twice: Twice, capsys: Any) -> None:
    """Its rows are the same bytes."""
    lines = [greedy(f"c{number}") for number in range(30)]
    first, num_first = twice(*lines)
    capsys.readouterr()
    second, num_second = twice(*lines)
    assert (num_first, num_second) == (30, 0)
    assert first.read_bytes().replace(b'"created":', b"") != b""
    assert [row["response"]["body"]["text"] for row in rows(second)] == [
        f"to c{number}" for number in range(30)
    ]
    assert "30 rows of 30 reused" in (stderr := capsys.readouterr().err)
    assert "every line has its row by reuse (30): nothing to run" in stderr


def test_a_run_computes_what_is_new_in_its_place(twice: Twice, capsys: Any) -> None:
    """Ids are those of the new line, also where it moved."""
    twice(*(greedy(f"c{number}") for number in range(6)))
    capsys.readouterr()
    edited = ["new", "c3", "c0", "other", "c5"]
    out, num_requests = twice(*map(greedy, edited))
    assert num_requests == 2
    assert "with 3 rows reused: 5 ok, 0 failed" in capsys.readouterr().err
    for name, row in zip(edited, rows(out), strict=True):
        assert row["custom_id"] == name
        assert row["response"]["body"]["text"] == f"to {name}"
        digest = row["id"].removeprefix("batch_req_")
        assert row["response"]["request_id"] == row["response"]["body"]["id"] == f"req_{digest}"


def test_rows_are_those_of_a_run_without_reuse(
    twice: Twice, run: Any, write_input: Write, tmp_path: Path
) -> None:
    """Any mixture of lines gives the same bytes."""
    lines = [
        greedy("a"), "{", line("b"), greedy("c", status=400), greedy("a"), line("d", seed=3),
        greedy("e", logprobs="x"),
    ]  # fmt: skip
    flags = ("--on-invalid-line", "skip")
    twice(*lines, flags=flags)
    out, num_requests = twice(*lines, flags=flags)
    assert num_requests == 2  # sampled, and failed
    plain = tmp_path / "plain.jsonl"
    model = ("--model", MODEL_PATH, "--any-model")
    run("-i", write_input(*lines), "-o", plain, *model, *flags)

    def timeless(path: Path) -> list[dict[str, Any]]:
        found = rows(path)
        for row in found:
            ((row["response"] or {}).get("body") or {}).pop("created", None)
        return found

    assert timeless(out) == timeless(plain)


def test_defaults_are_a_part_of_the_request(twice: Twice) -> None:
    """A default that makes a line greedy makes it determined; another is another request."""
    bare = line("a")
    assert twice(bare, flags=("--temperature", 0))[1] == 1
    assert twice(bare, flags=("--temperature", 0))[1] == 0
    assert twice(bare, flags=("--temperature", 0, "--max-tokens", 3))[1] == 1
    assert twice(bare)[1] == 1


def test_everything_is_reused_on_request(twice: Twice) -> None:
    """Sampled results are included."""
    for num_requests in (1, 0):
        assert twice(line("a"), flags=("--reuse-sampled",))[1] == num_requests


def test_a_resume_takes_its_own_rows_first(
    twice: Twice, run: Any, write_input: Write, tmp_path: Path, capsys: Any
) -> None:
    """A line is counted once, wherever its row comes from."""
    lines = [greedy(f"c{number}") for number in range(5)]
    first, _ = twice(*lines[:4])
    out = tmp_path / "resumed.jsonl"
    out.write_bytes(b"".join(first.read_bytes().splitlines(keepends=True)[:2]))
    capsys.readouterr()
    model = ("--model", MODEL_PATH, "--any-model", "--reuse", twice.folder)
    assert run("-i", write_input(*lines), "-o", out, "--resume", *model) == 0
    assert run.engine.num_requests == 1
    assert [row["custom_id"] for row in rows(out)] == [f"c{number}" for number in range(5)]
    assert "2 rows kept from earlier and 2 rows reused" in capsys.readouterr().err


def test_runs_share_the_results_of_a_bucket(
    ministack: Emulator, twice: Twice, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A bucket works like a folder; a missing bucket is reported and costs no line."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    twice.where = f"s3://{ministack.create().bucket}/kept"
    lines = [greedy(f"c{number}") for number in range(30)]
    first, num_first = twice(*lines)
    second, num_second = twice(greedy("new"), *lines[1:])
    assert (num_first, num_second) == (30, 1)
    assert [row["custom_id"] for row in rows(second)] == ["new", *(f"c{n}" for n in range(1, 30))]
    bodies = [
        [row["response"]["body"] | {"created": 0} for row in rows(each)[1:]]
        for each in (first, second)
    ]
    assert bodies[0] == bodies[1]
    twice.where = "s3://no-such-bucket-of-ours/kept"
    capsys.readouterr()
    out, num_requests = twice(*lines)
    assert (len(rows(out)), num_requests) == (30, 30)
    assert "the run continues without reuse" in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_left_alone(twice: Twice, capsys: Any) -> None:
    """The run goes on without it and prints a note."""
    twice.folder.mkdir()
    (twice.folder / FILE_NAME).write_bytes(b"something else" * 1_000)
    out, num_requests = twice(greedy("a"))
    assert (len(rows(out)), num_requests) == (1, 1)
    assert "cannot use the result cache: file is not a database" in capsys.readouterr().err


def test_a_cache_that_fails_amid_a_run_is_left_alone(
    twice: Twice, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A full disk is an example: every line still gets its row."""
    from tidemill.batch.result_cache import ResultCache
    from tidemill.batch.result_key import CacheError

    def fail(*_: object) -> None:
        raise CacheError("cannot use the result cache: database or disk is full")

    monkeypatch.setattr(ResultCache, "add", fail)
    out, num_requests = twice(*(greedy(f"c{number}") for number in range(5)))
    assert (len(rows(out)), num_requests) == (5, 5)
    assert capsys.readouterr().err.count("disk is full: the run continues without reuse") == 1


def test_rows_that_no_disk_takes_are_computed(
    twice: Twice, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Rows that were stored before are also computed again."""
    lines = [greedy(f"c{number}") for number in range(5)]
    first, _ = twice(*lines)
    add, num_added = ReusedRows.add, 0

    def add_two(rows: ReusedRows, row: bytes | None) -> None:
        nonlocal num_added
        num_added += row is not None
        if num_added > 2 and row is not None:
            raise OSError(28, "No space left on device")
        add(rows, row)

    monkeypatch.setattr(ReusedRows, "add", add_two)
    second, num_requests = twice(*lines)
    assert num_requests == 5
    assert [row["custom_id"] for row in rows(second)] == [row["custom_id"] for row in rows(first)]
    assert "(No space left on device): the run continues without reuse" in capsys.readouterr().err


def test_a_model_that_is_not_here_reuses_nothing(
    run: Any, write_input: Write, tmp_path: Path, capsys: Any
) -> None:
    """Its digest is not known before it is loaded."""
    out = tmp_path / "out.jsonl"
    assert run("-i", write_input(greedy("a")), "-o", out, "--reuse", tmp_path / "kept") == 0
    assert "m is not on this machine yet" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()


def test_replies_of_another_day_than_that_of_the_lookup_are_not_kept(tmp_path: Path) -> None:
    """A template may tell the date; rows of a resume have the time of the first run."""
    with closing(ResultCache.open(tmp_path, Scope(b"one", "m"))) as cache:
        reuse = Reuse(cache, ReusedRows(tmp_path), 86_400, ResultKeys(["m"]))
        times = [86_399, 86_400, 2 * 86_400 - 1, 2 * 86_400]
        body = {"messages": [], "temperature": 0}
        keys = [reuse.key_of("/v1/chat/completions", body, "a", created) for created in times]
        reuse.rows.close()
    assert [key is not None for key in keys] == [False, True, True, False]


@pytest.mark.parametrize("flag", [("--reuse-sampled",), ("--reuse-max-size", "1G")])
def test_flags_of_reuse_need_it(
    run: Any, write_input: Write, tmp_path: Path, flag: tuple[str, ...]
) -> None:
    """They would do nothing."""
    with pytest.raises(Refused, match="require --reuse"):
        run("-i", write_input(greedy("a")), "-o", tmp_path / "out", *flag)


def test_a_size_bounds_what_is_kept(twice: Twice) -> None:
    """Results that were used longest ago go first."""
    for _ in range(2):
        assert twice(*(greedy(f"c{n}") for n in range(9)), flags=("--reuse-max-size", "1K"))[1] == 9


def test_rows_hold_what_was_printed(twice: Twice) -> None:
    """Numbers, escapes and characters are not printed a second time."""
    reply = {"id": "x", "created": 5, "text": 'é "\\u0000 \\" 1e400', "n": [0.1, 1e-7, None]}
    lines = [greedy("a", reply=reply)]
    first, second = twice(*lines)[0], twice(*lines)[0]
    assert json.loads(first.read_text())["response"]["body"]["n"] == [0.1, 1e-7, None]
    assert first.read_bytes() == second.read_bytes()


REQUESTS = st.fixed_dictionaries(
    {
        "say": st.sampled_from(["yes", "no", 'é "created":1']),
        "temperature": st.sampled_from([0, 1]),
    },
    optional={"seed": st.integers(0, 1), "user": st.text(max_size=2), "status": st.just(400)},
)
FILES = st.lists(st.tuples(st.sampled_from("abc"), REQUESTS), max_size=12)


@given(first=FILES, second=FILES, is_sampled=st.booleans())
def test_any_edit_of_any_file_has_the_rows_of_a_run_without_reuse(
    tmp_path_factory: pytest.TempPathFactory,
    first: list[tuple[str, dict[str, Any]]],
    second: list[tuple[str, dict[str, Any]]],
    *,
    is_sampled: bool,
) -> None:
    """One run after another, with and without it."""
    folder = tmp_path_factory.mktemp("reuse")
    reuse = ["--reuse", folder / "kept", *(["--reuse-sampled"] if is_sampled else [])]
    for number, requests in enumerate((first, [*first[:3], *second])):
        source = folder / f"{number}.jsonl"
        source.write_text("".join(line(name, **body) + "\n" for name, body in requests))
        outs = folder / "with.jsonl", folder / "without.jsonl"
        for out, flags in zip(outs, (reuse, ()), strict=True):
            Runner()(
                "-i", source, "-o", out, "--model", MODEL_PATH, "--any-model", "--force", *flags
            )
        assert outs[0].read_bytes() == outs[1].read_bytes()


class Echo:
    """A responder that repeats its request and counts requests."""

    num_requests = 0

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer."""
        self.num_requests += 1
        status = body.get("status", 200)
        return Reply(
            status, {"id": request_id, "created": created, "text": [url, body["messages"]]}
        )


async def test_a_server_reuses_what_lines_of_files_were_answered(tmp_path: Path) -> None:
    """Across its lives; what is sampled or failed is computed, and nothing of another digest."""
    chat, echo, digest = "/v1/chat/completions", Echo(), [b"one"]
    options = SimpleNamespace(reuse=tmp_path, reuse_max_size=None)

    async def ask(created: int, **body: Any) -> Reply:
        with daily_results(options, "m", lambda _created: digest[0]) as open_at:
            responder = ReusingResponder(echo, open_at, ResultKeys(["m"]))
            return await responder.respond(chat, body, f"req_{created:024}", created)

    first = await ask(1, messages=["é"], temperature=0)
    second = await ask(2, messages=["é"], temperature=0)
    assert (first.is_reused, second.is_reused, echo.num_requests) == (False, True, 1)
    assert second.body == first.body | {"id": f"req_{2:024}", "created": 2}
    assert second.usage == Usage()
    for body in ({"temperature": 1}, {"temperature": 0, "status": 400}):
        for created in (3, 4):
            assert not (await ask(created, messages=["a"], **body)).is_reused
    digest[0] = b"another"
    assert not (await ask(5, messages=["é"], temperature=0)).is_reused


async def test_a_server_reuses_what_is_not_written_yet(tmp_path: Path) -> None:
    """Results are written some hundred at a time."""
    options, echo = SimpleNamespace(reuse=tmp_path, reuse_max_size=None), Echo()
    with daily_results(options, "m", lambda _created: b"one") as open_at:
        responder = ReusingResponder(echo, open_at, ResultKeys(["m"]))
        for created in (1, 2):
            body = {"messages": ["a"], "temperature": 0}
            reply = await responder.respond("/v1/chat/completions", body, f"req_{created}", created)
    assert (reply.is_reused, echo.num_requests) == (True, 1)


async def test_a_server_goes_on_without_results(tmp_path: Path, capsys: Any) -> None:
    """The failure is reported once, whatever its cause."""
    (tmp_path / FILE_NAME).write_bytes(b"something else" * 1_000)
    options = SimpleNamespace(reuse=tmp_path, reuse_max_size=None)
    with daily_results(options, "m", lambda _created: b"one") as open_at:
        responder = ReusingResponder(echo := Echo(), open_at, ResultKeys(["m"]))
        for created in range(3):
            body = {"messages": ["a"], "temperature": 0}
            await responder.respond("/v1/chat/completions", body, f"req_{created}", created)
    assert echo.num_requests == 3
    assert capsys.readouterr().err.count("the server continues without reuse") == 1


@pytest.mark.parametrize("model", [None, MODEL])
async def test_a_second_batch_of_a_server_reuses_every_row(
    tmp_path: Path, model: str | None
) -> None:
    """Lines with and without `model`; equal sampled lines have their own results."""
    options = SimpleNamespace(reuse=tmp_path / "kept", reuse_max_size=None)
    bodies = [{"model": model, "temperature": 0}, *[{"model": model, "say": "a"}] * 3]
    engine, batches = LocalEngine(), []
    with daily_results(options, MODEL, lambda _created: b"one") as open_at:
        keys = ResultKeys([MODEL], sampled=True)
        responder = ReusingResponder(engine, open_at, keys)
        async with serving(tmp_path / "store", engine, responder=responder) as local:
            for _ in range(2):
                batch = await local.submit(lines_of(bodies))
                batches.append(await local.ended(batch["id"]))
            rows = [await local.rows(batch["output_file_id"]) for batch in batches]
    assert len(engine.requests) == 4
    assert [batch["tidemill"]["reused_rows"] for batch in batches] == [0, 4]
    texts = [[row["response"]["body"]["say"] for row in each] for each in rows]
    assert texts == [["s0", "a", "a", "a"]] * 2
