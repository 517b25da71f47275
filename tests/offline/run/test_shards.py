"""`tidemill run --shard` and `tidemill join`: together they write what one run writes."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.place import typed
from tests.offline.given import CHAT, line, rows
from tidemill.cli.main import main
from tidemill.offline.console.errors import BadInput, EngineLost, Refused
from tidemill.offline.files import input_check

Write = Callable[..., Path]
COUNT = 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input with a mark, blank lines, a malformed one, failures, a long line and no end."""
    bodies: list[dict[str, Any]] = [{}, {"status": 400}, {"say": "x" * 200}, {}, {"raise": "x"}]
    lines = [line(f"c{number}", **body) for number, body in enumerate([*bodies, {}, {}])]
    path = tmp_path / "in.jsonl"
    text = "\n".join([*lines[:2], "", "{", *lines[2:5], "  ", *lines[5:]])
    path.write_text(f"\ufeff{text}", encoding="utf-8")
    os.utime(path, (1, 1_700_000_000))
    return path


@pytest.fixture
def shards(run: Any, source: Path, tmp_path: Path) -> Callable[..., list[int]]:
    """Return a function that runs shards, all of them by default, and gives their statuses."""

    def run_shards(*flags: object, numbers: Any = None, count: int = COUNT) -> list[int]:
        given = ["-i", source, "-o", tmp_path / "rows", "--on-invalid-line", "skip"]
        numbers = numbers or range(1, count + 1)
        return [run(*given, "--shard", f"{number}/{count}", *flags) for number in numbers]

    return run_shards


@pytest.mark.parametrize("count", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("errors", [None, "errors"])
def test_joined_shards_are_the_bytes_of_one_run(  # noqa: PLR0917 - fixtures and cases
    run: Any, shards: Any, source: Path, tmp_path: Path, count: int, errors: str | None
) -> None:
    """For any count, shards without a line among them; by their marks, and by the input."""
    whole, joined = tmp_path / "whole", tmp_path / "rows"
    given = ["-i", source, "-o", whole, "--on-invalid-line", "skip"]
    assert run(*given, *(["-e", tmp_path / "bad"] if errors else [])) == 0
    flags = ["-e", tmp_path / "errors"] if errors else []
    shards(*flags, count=count)
    for more in ([], ["-i", source, "--force"], ["--force", "--remove"]):
        assert main(["join", str(joined), *map(str, [*flags, *more])]) == 0
        assert joined.read_bytes() == whole.read_bytes()
        if errors:
            assert (tmp_path / "errors").read_bytes() == (tmp_path / "bad").read_bytes()
    left = {path.name for path in tmp_path.iterdir()} - {"whole.settings", "rows.settings"}
    assert left == {"in.jsonl", "whole", "rows"} | ({"bad", "errors"} if errors else set())


@pytest.mark.parametrize("form", ["gzip", "array", "pipe"])
def test_inputs_that_are_not_plain_files_are_sharded(
    run: Any, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run shards a plain copy; a join also reads the input in any form."""
    lines = [line(f"c{number}") for number in range(5)]
    data = "".join(f"{each}\n" for each in lines).encode()
    forms = {"gzip": gzip.compress(data), "array": f"[{', '.join(lines)}]".encode(), "pipe": data}
    source, out = tmp_path / "in", tmp_path / "rows"
    source.write_bytes(forms[form])
    for number in (1, 2):
        with source.open() as stream:
            monkeypatch.setattr("sys.stdin", stream)
            name = "-" if form == "pipe" else source
            assert run("-i", name, "-o", out, "--shard", f"{number}/2") == 0
    assert main(["join", str(out), "-i", str(source)]) == 0
    assert [row["custom_id"] for row in rows(out)] == [f"c{number}" for number in range(5)]


def test_a_shard_parses_its_own_lines_alone(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines before and after it are not parsed."""
    parsed = []
    parse_fields = input_check.parse_fields
    monkeypatch.setattr(
        input_check, "parse_fields", lambda raw: parsed.append(raw.number) or parse_fields(raw)
    )
    source = write_input(*(line(f"c{number}") for number in range(8)))
    assert run("-i", source, "-o", tmp_path / "rows", "--shard", "2/4") == 0
    assert parsed == [3, 4]


def test_messages_name_the_shard(
    shards: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They contain its lines at the start, its rows at the end, and its errors."""
    shards(numbers=[1])
    stderr = capsys.readouterr().err
    assert f"shard 1 of 3: lines 1 to 5 of {tmp_path / 'in.jsonl'}\n" in stderr
    assert "tidemill: shard 1 of 3: 4 rows in " in stderr
    with pytest.raises(BadInput, match=r"in.jsonl \(shard 1 of 3\) has 1 malformed line"):
        shards("--force", "--on-invalid-line", "fail", numbers=[1])
    shards("--resume", numbers=[1])
    assert "shard 1 of 3: every line has its row already (4)" in capsys.readouterr().err


def test_a_shard_is_resumed_and_no_other(run: Any, shards: Any, tmp_path: Path) -> None:
    """Missing lines are run; rows of another shard count or another file are refused."""
    shards()
    last = tmp_path / "rows.3-of-3"
    whole, mark = last.read_bytes(), (tmp_path / "rows.3-of-3.done").read_bytes()
    last.write_bytes(whole[:-1])
    run.engine = None
    shards("--resume", numbers=[3])
    assert (run.engine.num_requests, last.read_bytes()) == (1, whole)
    assert (tmp_path / "rows.3-of-3.done").read_bytes() == mark
    last.rename(tmp_path / "rows.4-of-5")
    with pytest.raises(BadInput, match="the output has another input"):
        shards("--resume", numbers=[4], count=5)


def test_failed_rows_of_a_shard_are_run_again_in_their_places(
    run: Any, write_input: Write, tmp_path: Path
) -> None:
    """The mark of the shard is that of the new rows."""
    source, out = write_input(line("a"), line("b", name="b"), line("c")), tmp_path / "rows"
    given = ["-i", source, "-o", out]
    run.fails_at = {"b"}
    for number in (1, 2):
        run(*given, "--shard", f"{number}/2")
    run.fails_at = set()
    assert run(*given, "--shard", "1/2", "--resume", "--retry-failed") == 0
    assert main(["join", str(out)]) == 0
    assert [row["response"]["status_code"] for row in rows(out)] == [200] * 3


def test_a_shard_none_of_whose_lines_can_run_has_their_error_rows(
    run: Any, write_input: Write, tmp_path: Path
) -> None:
    """A run of the whole file does the same; it is refused if no line of the file can run."""
    other = line("b", model="other", status=404)
    source, out = write_input(line("a"), line("a"), other), tmp_path / "rows"
    assert run("-i", source, "-o", out, "--shard", "2/2") == 3
    assert [row["custom_id"] for row in rows(tmp_path / "rows.2-of-2")] == ["b"]
    source = write_input(other, other)
    with pytest.raises(BadInput, match=r"1 of 1 line request other, but the served model is m"):
        run("-i", source, "-o", out, "--shard", "1/2")


def test_where_the_rows_of_a_shard_go(run: Any, write_input: Write, tmp_path: Path) -> None:
    """They are next to the output; stdout remains stdout; a URL and the input are refused."""
    source = write_input(line("a"))
    assert run(source, "--shard", "1/1") == 0
    assert len(rows(tmp_path / "in.output.jsonl.1-of-1")) == 1
    assert run(source, "-o", "-", "--shard", "1/1") == 0
    with pytest.raises(Refused, match="is a URL: pass a path with -o"):
        run(source, "-o", "http://127.0.0.1:1/rows", "--shard", "1/1")
    with pytest.raises(Refused, match="the input and the output are the same file"):
        run(source, "-o", source, "--shard", "1/1")


def join(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Join shards; return the exit status and stderr."""
    capsys.readouterr()
    status, _, stderr = typed(capsys, "join", *map(str, arguments))
    return status, stderr


def test_unfinished_shards_are_named(
    shards: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, cut off, waiting, or changed: nothing is written until all are whole."""
    out = tmp_path / "rows"
    assert join(capsys, out) == (
        2,
        f"tidemill: no shards of {out} found, such as {out}.1-of-2\n",
    )
    shards(numbers=[1, 3])
    assert join(capsys, out)[1].endswith(f"cannot be joined yet:\n  {out}.2-of-3 is missing\n")
    shards(numbers=[2])
    spool = tmp_path / "rows.1-of-3.spool"
    spool.touch()
    (tmp_path / "rows.2-of-3.done").unlink()
    third = tmp_path / "rows.3-of-3"
    third.write_bytes(third.read_bytes() * 2)
    status, stderr = join(capsys, out)
    assert status == 2
    assert "1-of-3 is not finished: run its shard with --resume" in stderr
    assert "2-of-3 has no rows.2-of-3.done, so its run has not finished" in stderr
    assert "when its run ended" in stderr
    assert not out.exists()
    shards("--force")
    out.touch()
    assert join(capsys, out) == (
        2,
        f"tidemill: {out} already exists: pass --force to overwrite it\n",
    )
    assert join(capsys, out, "--force")[0] == 0
    assert not spool.exists()


def test_rows_are_compared_with_the_input(
    shards: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With -i no mark is required, and a missing or surplus row is named."""
    shards()
    out, second = tmp_path / "rows", tmp_path / "rows.2-of-3"
    good = second.read_bytes()
    first_row = good.index(b"\n") + 1
    for bad, words in (
        (good[:-first_row], "has no row at its place in"),
        (good[first_row:], "line 6 of"),
        (good + good[:first_row], "does not match a line of shard 2 of 3"),
        (good + b"{", "is incomplete"),
        (b"", "run shard 2 of 3 with --resume"),
    ):
        second.write_bytes(bad)
        status, stderr = join(capsys, out, "-i", source)
        assert (status, words in stderr) == (1, True), stderr
    second.write_bytes(good)
    for mark in tmp_path.glob("*.done"):
        mark.unlink()
    assert join(capsys, out, "-i", source) == (
        0,
        (
            "tidemill: note: the settings of 3 shards are unknown, so they were not compared\n"
            f"tidemill: joined 8 rows (3 failed) of 3 shards in {out}\n"
        ),
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        *("in.jsonl", "rows", "rows.1-of-3", "rows.2-of-3", "rows.3-of-3")
    }


def test_a_shard_whose_bytes_changed_is_not_joined(
    shards: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mark holds a digest: a damaged copy of the same length is refused; an old mark has none."""
    shards()
    out, second = tmp_path / "rows", tmp_path / "rows.2-of-3"
    good = second.read_bytes()
    second.write_bytes(good.replace(b"custom_id", b"custom-id", 1))
    assert "2-of-3 changed after its run ended, or was damaged by copying" in join(capsys, out)[1]
    assert not out.exists()
    second.write_bytes(good)
    mark = tmp_path / "rows.2-of-3.done"
    mark.write_text(json.dumps({**json.loads(mark.read_bytes()), "digests": None}))
    assert join(capsys, out)[0] == 0


def test_shards_of_different_runs_are_not_joined(
    shards: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Different counts require -n; shards of a changed input do not match."""
    out = tmp_path / "rows"
    shards()
    shards(numbers=[1], count=2)
    assert (
        "has shards of several runs, with different numbers of shards (2, 3)"
        in join(capsys, out)[1]
    )
    assert join(capsys, out, "-n", 3)[0] == 0
    out.unlink()
    source.write_bytes(source.read_bytes().replace(b'"c0"', b'"d0"'))
    shards("--force", numbers=[1])
    assert "1-of-3 and " in (stderr := join(capsys, out, "-n", 3)[1])
    assert "have different inputs" in stderr
    assert not out.exists()


def test_a_shard_that_is_being_written_is_not_joined(
    spawn: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed run does not leave a shard that looks finished either."""
    source, out = tmp_path / "in.jsonl", tmp_path / "rows"
    source.write_text(f"{line('a')}\n{line('b', wait=60)}\n")
    process = spawn("-i", source, "-o", out, "--shard", "1/1")
    part = tmp_path / "rows.1-of-1"
    while not part.exists() or not part.read_bytes():
        assert process.poll() is None
    assert f"a run is writing {part}" in join(capsys, out)[1]
    process.kill()
    process.wait()
    assert f"{part} has no rows.1-of-1.done" in join(capsys, out)[1]
    assert "line 2 of" in join(capsys, out, "-i", source)[1]
    assert not out.exists()


def test_a_run_that_starts_over_removes_the_mark_first(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted run has no mark; a refused run changes nothing."""
    source, out = write_input(line("a"), line("b", name="b")), tmp_path / "rows"
    given = ["-i", source, "-o", out, "--shard", "1/1"]
    run(*given)
    with pytest.raises(Refused, match="already contains rows"):
        run(*given)
    assert join(capsys, out)[0] == 0
    run.dies_at = "b"
    with pytest.raises(EngineLost):
        run(*given, "--force", "--max-inflight", 1)
    assert "so its run has not finished" in join(capsys, out, "--force")[1]


def test_an_error_file_is_joined_where_there_was_one(
    shards: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A join that leaves it out, or names one that no run had, is refused."""
    out, errors = tmp_path / "rows", tmp_path / "errors"
    shards("-e", errors)
    assert "an error file: pass it with -e" in join(capsys, out)[1]
    assert json.loads((tmp_path / "rows.1-of-3.done").read_text())["error_bytes"] > 0
    shards("--force")
    assert "no error file: remove -e" in join(capsys, out, "-e", errors)[1]


def test_a_failed_join_leaves_no_output(
    shards: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """However late it fails; the shards stay, and the next join is whole."""
    shards()
    out = tmp_path / "rows"

    def fail(_: int) -> None:
        raise OSError(5, "no disk")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        assert join(capsys, out, "--remove")[0] == 1
    assert not [*tmp_path.glob("rows"), *tmp_path.glob("*.joining")]
    (tmp_path / "rows.joining").write_text("of a join that was killed")
    assert join(capsys, out)[0] == 0
    assert CHAT not in out.read_text()[:10]
