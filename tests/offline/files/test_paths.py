"""Paths and URLs that cannot work are refused first, with one sentence and exit status 2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line
from tidemill.offline.console.errors import Refused
from tidemill.offline.files.paths import display_name, name_files

Write = Callable[..., Path]


@pytest.fixture
def source(write_input: Write) -> Path:
    """An input that would be refused for its bad line if it were read."""
    return write_input("{")


def refusal(run: Any, *arguments: object) -> str:
    """Return the one sentence that the run is refused with; nothing was loaded."""
    with pytest.raises(Refused) as refused:
        run(*arguments)
    assert refused.value.exit_status == 2
    assert run.engine is None
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_one_file_cannot_be_input_and_output(
    run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever way leads there: ./, a symlink, a hard link, a symlink to the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "soft.jsonl").symlink_to(source)
    os.link(source, tmp_path / "hard.jsonl")
    (tmp_path / "folder").symlink_to(tmp_path)
    for name in (source, "in.jsonl", "./in.jsonl", "soft.jsonl", "hard.jsonl", "folder/in.jsonl"):
        assert "are the same file" in refusal(run, "-i", source, "-o", name)
        assert "are the same file" in refusal(run, "-i", name, "-o", source)
        assert "are the same file" in refusal(run, "-i", source, "-o", "out", "-e", name)
    assert source.read_text() == "{\n"


def test_one_new_file_cannot_be_output_and_error_file(
    run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of a file that is not there yet are compared too."""
    monkeypatch.chdir(tmp_path)
    words = refusal(run, "-i", source, "-o", tmp_path / "new", "-e", "./new")
    assert "the output and the error file are the same file" in words
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flag", ["-o", "-e"])
def test_an_output_must_be_a_file_that_can_be_made(
    run: Any, source: Path, tmp_path: Path, flag: str
) -> None:
    """A directory, a missing folder, a file as a folder and a read-only folder are refused."""
    other = ["-o", tmp_path / "out"] if flag == "-e" else []
    assert "is a directory" in refusal(run, "-i", source, *other, flag, tmp_path)
    missing = tmp_path / "no" / "out.jsonl"
    assert "folder that does not exist" in refusal(run, "-i", source, *other, flag, missing)
    below = source / "out.jsonl"
    assert "folder that does not exist" in refusal(run, "-i", source, *other, flag, below)
    # No user can create files there, not even root.
    assert "cannot be written: check the permissions" in refusal(
        run, "-i", source, *other, flag, "/proc/self/out.jsonl"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "rows.csv",
            "the output rows.csv would contain JSONL rows, but has another suffix: use rows.jsonl",
        ),
        ("rows.xlsx", "use rows.jsonl"),
        ("rows.jsonl.gz", "outputs are not compressed: use rows.jsonl"),
    ],
)
def test_the_name_of_an_output_is_that_of_its_format(
    run: Any, source: Path, tmp_path: Path, name: str, error: str
) -> None:
    """A file of requests gives JSONL, whatever the name of its output promises."""
    assert error in refusal(run, "-i", source, "-o", name)
    assert error in refusal(run, "-i", source, "-o", tmp_path / "rows", "-e", name)


def test_an_input_must_be_there(run: Any, tmp_path: Path) -> None:
    """Missing, a directory, a symlink to nothing."""
    out = tmp_path / "out"
    assert "does not exist" in refusal(run, "-i", tmp_path / "none", "-o", out)
    assert "is a folder: choose one file in it" in refusal(run, "-i", tmp_path, "-o", out)
    assert "is a folder: choose one file in it" in refusal(run, tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "does not exist" in refusal(run, "-i", tmp_path / "dangling", "-o", out)
    assert not out.exists()


def test_schemes_other_than_http_and_s3_are_refused(run: Any, source: Path, tmp_path: Path) -> None:
    """The sentence says what is possible."""
    assert "r2:// is not supported" in refusal(run, "-i", "r2://b/k", "-o", tmp_path / "out")
    assert "gs:// is not supported" in refusal(run, "-i", source, "-o", "gs://b/k")
    assert "has no host" in refusal(run, "-i", "http:///k", "-o", tmp_path / "out")
    assert "a URL is not valid" in refusal(run, "-i", "http://[::1", "-o", tmp_path / "out")


@pytest.mark.parametrize("name", ["s3://", "s3://b", "s3://b/", "s3:///k", "s3://b/folder/"])
def test_an_s3_url_that_names_no_object_is_refused(run: Any, source: Path, name: str) -> None:
    """It is refused as input and as output."""
    for names in (("-i", name, "-o", "-"), ("-i", source, "-o", name)):
        assert refusal(run, *names) == f"{name} is not an S3 object: use s3://bucket/key"


def test_an_object_is_not_run_into_itself(run: Any) -> None:
    """The case of the scheme does not matter."""
    words = refusal(run, "-i", "s3://b/k", "-o", "S3://b/k")
    assert words == "the input and the output are the same object: s3://b/k"


def test_an_object_is_neither_resumed_nor_part_of_a_file(run: Any, source: Path) -> None:
    """Its rows come at the end."""
    words = refusal(run, "-i", source, "-o", "s3://b/k", "--resume")
    assert words == "--resume requires an output that is a regular file"
    words = refusal(run, "-i", source, "-o", "s3://b/k", "--shard", "1/2")
    assert words.endswith("s3://b/k is a URL: pass a path with -o")


def test_a_closed_standard_stream_is_reported(
    run: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell closes one by `<&-` or `>&-`: nothing is read, and no row is lost."""
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in refusal(run, "-i", "-", "-o", tmp_path / "out")
    monkeypatch.setattr("sys.stdout", None)
    assert "standard output is closed" in refusal(run, "-i", source, "-o", "-")


@pytest.mark.parametrize("name", ["-", "http://127.0.0.1/errors?key=secret"])
def test_an_error_file_must_be_a_path(run: Any, source: Path, tmp_path: Path, name: str) -> None:
    """Neither a stream nor a URL."""
    words = refusal(run, "-i", source, "-o", tmp_path / "out", "-e", name)
    assert words == "the error file must be a path, not a stream or a URL"


def test_only_an_ordinary_file_can_be_resumed(run: Any, source: Path) -> None:
    """A stream, a URL and a device cannot."""
    for name in ("-", "http://127.0.0.1/out", "/dev/null"):
        assert "--resume requires" in refusal(run, "-i", source, "-o", name, "--resume")


def test_a_folder_for_temporary_files_must_be_there(run: Any, source: Path, tmp_path: Path) -> None:
    """It is named."""
    flags = ["--output-tmp-dir", tmp_path / "none"]
    assert "none of --output-tmp-dir" in refusal(run, "-i", source, "-o", tmp_path / "out", *flags)


def test_a_refusal_is_one_line_and_status_2(spawn: Callable[..., Any], source: Path) -> None:
    """The process prints nothing else."""
    process: subprocess.Popen[str] = spawn("-i", source, "-o", source)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err == f"tidemill: the input and the output are the same file: {source}\n"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("-", "standard output"),
        ("a/b?c", "a/b?c"),
        ("https://me:pw@host:1/a/b?key=secret#x", "https://host:1/a/b"),
        ("HTTP://host", "http://host"),
    ],
)
def test_names_are_shown_without_secrets(name: str, shown: str) -> None:
    """User, query and fragment of a URL never appear."""
    assert display_name(name) == shown


@pytest.mark.parametrize(
    ("name", "neighbour"),
    [
        ("x.jsonl", "x.output.jsonl"),
        ("a/x.jsonl.gz", "a/x.output.jsonl"),
        ("x.json", "x.output.jsonl"),
        ("x", "x.output.jsonl"),
        ("x.v2.jsonl", "x.v2.output.jsonl"),
        ("https://host/a/x.jsonl?key=secret", "x.output.jsonl"),
        ("https://host/", "batch.output.jsonl"),
    ],
)
def test_the_output_is_next_to_the_file_by_default(name: str, neighbour: str) -> None:
    """The output of a URL is in the working folder; its name omits the query."""
    assert name_files(None, None, [name]) == (name, neighbour)
    assert name_files(name, None, []) == (name, neighbour)
    assert name_files(None, "out", [name]) == (name, "out")


def test_rows_of_standard_input_go_to_standard_output() -> None:
    """The command works as a filter."""
    assert name_files(None, None, ["-"]) == ("-", "-")


def test_a_pipe_needs_a_named_output(tmp_path: Path) -> None:
    """No default place would be obvious."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused, match="is not a regular file: "):
        name_files(None, None, [str(tmp_path / "pipe")])


def test_a_file_alone_runs_and_is_resumed(run: Any, write_input: Write) -> None:
    """The rows are next to it and are never overwritten by default."""
    source = write_input(line("a"))
    assert run(source) == 0
    out = source.with_name("in.output.jsonl")
    before = out.read_bytes()
    with pytest.raises(Refused, match="already contains rows: pass --resume to keep them"):
        run(source)
    assert run(source, "--resume") == 0
    assert out.read_bytes() == before
