"""The commands of `tidemill` as people type them, against the API and against `tidemill serve`."""

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
    """Return the address and the key of a server that answers as bodies say."""
    names = ("--served-model-name", demo.NAME, SCRIPTED)
    with served(tmp_path_factory.mktemp("server"), *names, "--api-key", "sk-one") as found:
        yield Api(str(found.client.base_url), "sk-one")


@pytest.fixture(autouse=True, scope="module")
def started(api: Api, server: Api) -> None:
    """Start both before the first test, which leaves the process as it was."""


@pytest.fixture(params=["server", "api"])
def typed(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Type:
    """Return a function that types a command in a folder of its own."""
    api: Api = request.getfixturevalue(request.param)
    monkeypatch.setenv("TIDEMILL_BASE_URL", api.url)
    monkeypatch.setenv("TIDEMILL_API_KEY", api.key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def type_(*arguments: str) -> Result:
        capfd.readouterr()
        status = main(arguments)
        printed = capfd.readouterr()
        # The API of this process may log to the same place.
        out = re.sub(r'^{.*"service":"tidemill".*}\n', "", printed.out, flags=re.MULTILINE)
        return Result(status, out, printed.err)

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
    """Return the ids of the rows in a file, in their order."""
    return [json.loads(row)["custom_id"] for row in Path(name).read_text().splitlines()]


def test_the_example_file_is_answered(typed: Type) -> None:
    """Looked at, uploaded, run by the demo model, fetched: every line has its row."""
    printed = typed("submit", str(EXAMPLE), "--wait", "-o", "rows.jsonl", "-e", "errors.jsonl")
    lines = [json.loads(one) for one in EXAMPLE.read_text().splitlines()]
    assert printed.status == 0, printed.err
    assert custom_ids("rows.jsonl") == [one["custom_id"] for one in lines]
    assert not Path("errors.jsonl").exists()
    batch_id = printed.out.strip()
    assert typed("submit", str(EXAMPLE), "--dry-run").status == 0
    detail = typed("status", batch_id)
    assert demo.NAME in detail.out
    assert f"{len(lines)} ok, 0 failed, of {len(lines)}" in detail.out


def test_a_large_file_goes_through_the_storage(typed: Type) -> None:
    """In parts, by addresses of each; its rows come back to the byte and in order."""
    file = write("in.jsonl", *(line(str(number), prompt="x" * 10**6) for number in range(20)))
    printed = typed("submit", file, "--wait", "--json")
    assert printed.status == 0, printed.err
    assert custom_ids("in.output.jsonl") == [str(number) for number in range(20)]
    ended = printed.values[-1]
    assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert typed("results", ended["id"], "-o", "again.jsonl").status == 0
    assert Path("again.jsonl").read_bytes() == Path("in.output.jsonl").read_bytes()


def test_rows_that_failed_are_apart_and_the_status_says_so(typed: Type) -> None:
    """As many as there are, each in the file of its kind."""
    lines = [line("good"), line("bad", status=400), line("fine")]
    printed = typed("submit", write("in.jsonl", *lines), "--wait")
    assert printed.status == 3
    assert custom_ids("in.output.jsonl") == ["good", "fine"]
    assert custom_ids("in.errors.jsonl") == ["bad"]
    assert typed("status", "@last", "--watch").status == 3
    shown = typed("results", printed.out.strip(), "-o", "-")
    assert [value["custom_id"] for value in shown.values] == ["good", "fine"]


def test_rows_are_followed_while_the_batch_runs(
    typed: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow one, which waits until the others are printed, comes last, and each comes once."""
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
    printed = typed("results", batch_id, "--follow")
    assert printed.status == 0, printed.err
    found = [value["custom_id"] for value in printed.values]
    assert sorted(found) == sorted(one["custom_id"] for one in lines)
    assert found[-1] == "slow"


def test_a_batch_is_cancelled_and_its_rows_are_kept(typed: Type) -> None:
    """What was finished by then is fetched, and the outcome is told."""
    lines = [line("quick"), *(line(str(number), wait=100) for number in range(3))]
    batch_id = typed("submit", write("in.jsonl", *lines)).out.strip()
    assert typed("status", batch_id).status == 0
    assert typed("results", batch_id).status == 1
    assert typed("cancel", batch_id, "--wait").status == 0
    printed = typed("resume", batch_id)
    assert printed.status == 6
    assert typed("cancel", batch_id).status == 0


def test_the_same_submission_twice_is_two_batches(typed: Type) -> None:
    """A file may be run again on purpose; the list starts with the newest batch."""
    file = write("in.jsonl", line("a"))
    ids = [typed("submit", file).out.strip() for _ in range(2)]
    listed = [value["id"] for value in typed("status", "--limit", "2", "--json").values]
    assert len(set(ids)) == 2
    assert listed == ids[::-1]


def test_the_last_batch_is_cancelled(typed: Type) -> None:
    """`@last` is the batch that was submitted last, also among batches of one second."""
    file = write("in.jsonl", line("a", wait=100))
    *others, last = (typed("submit", file).out.strip() for _ in range(3))
    cancelled = typed("cancel", "@last", "--json")
    for batch_id in others:
        typed("cancel", batch_id)
    assert [value["id"] for value in cancelled.values] == [last]


def test_what_the_server_refuses_is_told_in_its_words(typed: Type) -> None:
    """A file that the check here lets pass may still be for an endpoint that is none."""
    printed = typed("submit", write("in.jsonl", line("a")), "--endpoint", "/v1/walks")
    assert (printed.status, printed.out) == (1, "")
    assert "`endpoint` must be one of /v1/chat/completions" in printed.err


def test_a_key_of_nobody_is_refused(typed: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever command."""
    monkeypatch.setenv("TIDEMILL_API_KEY", f"tm_{'0' * 16}_{'x' * 43}")
    for arguments in (["submit", str(EXAMPLE)], ["status"], ["cancel", "batch_1"]):
        printed = typed(*arguments)
        assert (printed.status, printed.out) == (8, "")
