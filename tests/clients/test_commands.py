"""The commands of `tidemill` against the API and against `tidemill serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.api_rig import Result
from tests.clients.conftest import ROOT, SCRIPTED, Api
from tests.server.local.test_process import served
from tidemill import demo
from tidemill.cli.batches.rows import RowFollower
from tidemill.cli.main import main

EXAMPLE = ROOT / "examples" / "demo.jsonl"
Type = Callable[..., Result]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Return the address and the key of a server that answers as bodies request."""
    names = ("--served-model-name", demo.NAME, SCRIPTED)
    with served(tmp_path_factory.mktemp("server"), *names, "--api-key", "sk-one") as found:
        yield Api(str(found.client.base_url), "sk-one")


@pytest.fixture(autouse=True, scope="module")
def started(api: Api, server: Api) -> None:
    """Start both before the first test, because they change the process."""


@pytest.fixture(params=["server", "api"])
def typed(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Type:
    """Return a function that runs a command in a separate folder."""
    api: Api = request.getfixturevalue(request.param)
    monkeypatch.setenv("TIDEMILL_BASE_URL", api.url)
    monkeypatch.setenv("TIDEMILL_API_KEY", api.key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def type_(*arguments: str) -> Result:
        capfd.readouterr()
        status = main(arguments)
        result = capfd.readouterr()
        # The API of this process may log to the same stream.
        out = re.sub(r'^{.*"service":"tidemill".*}\n', "", result.out, flags=re.MULTILINE)
        return Result(status, out, result.err)

    return type_


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    """Return a request to the scripted engine, which does as its body says."""
    body = {"model": SCRIPTED, "prompt": "Hello"} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(name: str, *lines: dict[str, Any]) -> str:
    """Write a file of requests and return its name."""
    Path(name).write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    return name


def custom_ids(name: str) -> list[str]:
    """Return the IDs of the rows in a file, in order."""
    return [json.loads(row)["custom_id"] for row in Path(name).read_text().splitlines()]


def test_the_example_file_is_run(typed: Type) -> None:
    """It is checked, uploaded, run by the demo model and downloaded: every line has its row."""
    result = typed("submit", str(EXAMPLE), "--wait", "-o", "rows.jsonl", "-e", "errors.jsonl")
    lines = [json.loads(one) for one in EXAMPLE.read_text().splitlines()]
    assert result.status == 0, result.err
    assert custom_ids("rows.jsonl") == [one["custom_id"] for one in lines]
    assert not Path("errors.jsonl").exists()
    batch_id = result.out.strip()
    assert typed("submit", str(EXAMPLE), "--dry-run").status == 0
    detail = typed("status", batch_id)
    assert demo.NAME in detail.out
    assert f"{len(lines)} ok, 0 failed, of {len(lines)}" in detail.out


def test_a_large_file_is_uploaded_to_the_storage(typed: Type) -> None:
    """It is uploaded in parts by presigned URLs; its rows come back complete and in order."""
    file = write("in.jsonl", *(line(str(number), prompt="x" * 10**6) for number in range(10)))
    result = typed("submit", file, "--wait", "--json")
    assert result.status == 0, result.err
    assert custom_ids("in.output.jsonl") == [str(number) for number in range(10)]
    ended = result.values[-1]
    assert ended["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
    assert typed("results", ended["id"], "-o", "again.jsonl").status == 0
    assert Path("again.jsonl").read_bytes() == Path("in.output.jsonl").read_bytes()


def test_failed_rows_are_separate_and_set_the_exit_status(typed: Type) -> None:
    """Successes and failures are in separate files, and none is missing."""
    lines = [line("good"), line("bad", status=400), line("fine")]
    result = typed("submit", write("in.jsonl", *lines), "--wait")
    assert result.status == 3
    assert custom_ids("in.output.jsonl") == ["good", "fine"]
    assert custom_ids("in.errors.jsonl") == ["bad"]
    assert typed("status", "@last", "--watch").status == 3
    shown = typed("results", result.out.strip(), "-o", "-")
    assert [value["custom_id"] for value in shown.values] == ["good", "fine"]


def test_rows_are_followed_while_the_batch_runs(
    typed: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow row, which waits until the others are printed, is last, and each is printed once."""
    gate, sweep, num_rows = tmp_path / "gate", RowFollower.sweep, 0

    def counted(follower: RowFollower) -> Iterator[Any]:
        nonlocal num_rows
        for row in sweep(follower):
            yield row
            num_rows += 1
            if num_rows == 10:
                gate.touch()

    monkeypatch.setattr(RowFollower, "sweep", counted)
    lines = [line("slow", gate=str(gate)), *(line(str(number)) for number in range(10))]
    batch_id = typed("submit", write("in.jsonl", *lines)).out.strip()
    result = typed("results", batch_id, "--follow")
    assert result.status == 0, result.err
    found = [value["custom_id"] for value in result.values]
    assert sorted(found) == sorted(one["custom_id"] for one in lines)
    assert found[-1] == "slow"


def test_a_batch_is_cancelled_and_its_rows_are_kept(typed: Type) -> None:
    """Rows that had finished are downloaded, and the exit status reports the cancellation."""
    lines = [line("quick"), *(line(str(number), wait=100) for number in range(3))]
    batch_id = typed("submit", write("in.jsonl", *lines)).out.strip()
    assert typed("status", batch_id).status == 0
    assert typed("results", batch_id).status == 1
    assert typed("cancel", batch_id, "--wait").status == 0
    result = typed("resume", batch_id)
    assert result.status == 6
    assert typed("cancel", batch_id).status == 0


def test_submitting_a_file_twice_creates_two_batches(typed: Type) -> None:
    """Running a file again is allowed; the list starts with the newest batch."""
    file = write("in.jsonl", line("a"))
    ids = [typed("submit", file).out.strip() for _ in range(2)]
    listed = [value["id"] for value in typed("status", "--limit", "2", "--json").values]
    assert len(set(ids)) == 2
    assert listed == ids[::-1]


def test_the_last_batch_is_cancelled(typed: Type) -> None:
    """`@last` is the most recently submitted batch, also among batches of one second."""
    file = write("in.jsonl", line("a", wait=100))
    *others, last = (typed("submit", file).out.strip() for _ in range(3))
    cancelled = typed("cancel", "@last", "--json")
    for batch_id in others:
        typed("cancel", batch_id)
    assert [value["id"] for value in cancelled.values] == [last]


def test_a_refusal_of_the_server_is_printed(typed: Type) -> None:
    """A file that passes the local check may still be for an unsupported endpoint."""
    result = typed("submit", write("in.jsonl", line("a")), "--endpoint", "/v1/walks")
    assert (result.status, result.out) == (1, "")
    assert "`endpoint` must be one of /v1/chat/completions" in result.err


def test_an_unknown_key_is_refused(typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command reports it."""
    monkeypatch.setenv("TIDEMILL_API_KEY", f"tm_{'0' * 16}_{'x' * 43}")
    for arguments in (["submit", str(EXAMPLE)], ["status"], ["cancel", "batch_1"]):
        result = typed(*arguments)
        assert (result.status, result.out) == (8, "")
