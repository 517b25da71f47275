"""--resume keeps what is whole, runs what is missing and touches no file of another input."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import print_not_run, row_id_of
from tidemill.offline.console.errors import BadInput
from tidemill.offline.files.kept_rows import ROWS_PER_WRITE, KeptRows, find_kept_rows

Write = Callable[..., Path]


@pytest.fixture
def source(write_input: Write) -> Path:
    """An input of eight requests with a blank line, a malformed one and two failures among them."""
    bodies: list[dict[str, Any]] = [{}, {"status": 400}, {}, {"raise": "x"}, {}, {}, {}, {}]
    lines = [line("same", **body) for body in bodies]
    path = write_input(*lines[:3], "", "{", *lines[3:])
    os.utime(path, (1, 1_700_000_000))
    return path


@pytest.fixture
def whole(run: Any, source: Path, tmp_path: Path) -> bytes:
    """The output of an unbroken run."""
    assert run("-i", source, "-o", tmp_path / "whole", "--on-invalid-line", "skip") == 0
    return (tmp_path / "whole").read_bytes()


def test_an_output_cut_at_any_byte_becomes_that_of_an_unbroken_run(
    run: Any, source: Path, whole: bytes, tmp_path: Path
) -> None:
    """Complete rows stay, a torn one is run again; only missing lines are run."""
    out = tmp_path / "out"
    flags = ["-i", source, "-o", out, "--resume", "--on-invalid-line", "skip"]
    cuts = {0, 1, len(whole) - 1, len(whole), *random.Random(1).sample(range(len(whole)), 20)}
    for cut in sorted(cuts):
        out.write_bytes(whole[:cut])
        run.engine = None
        assert run(*flags) == 0
        assert out.read_bytes() == whole, cut
        missing = whole[: whole.rfind(b"\n", 0, cut) + 1].count(b"\n")
        if missing == whole.count(b"\n"):
            assert run.engine is None


def test_only_missing_lines_are_run(run: Any, source: Path, whole: bytes, tmp_path: Path) -> None:
    """Six rows are there, three lines are left."""
    out = tmp_path / "out"
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:6]))
    run("-i", source, "-o", out, "--resume", "--on-invalid-line", "skip")
    assert run.engine.num_requests == 3


def test_without_an_output_a_resume_is_a_run(
    run: Any, source: Path, whole: bytes, tmp_path: Path
) -> None:
    """The same command can be given again and again."""
    out = tmp_path / "out"
    assert run("-i", source, "-o", out, "--resume", "--on-invalid-line", "skip") == 0
    assert out.read_bytes() == whole


def test_the_kept_rows_say_when_the_job_was_made(
    run: Any, source: Path, whole: bytes, tmp_path: Path
) -> None:
    """An input that was touched or copied meanwhile changes nothing."""
    out = tmp_path / "out"
    out.write_bytes(whole.splitlines(keepends=True)[0])
    os.utime(source, (2, 1_800_000_000))
    assert run("-i", source, "-o", out, "--resume", "--on-invalid-line", "skip") == 0
    assert out.read_bytes() == whole


def test_two_files_cut_anywhere_become_those_of_an_unbroken_run(
    run: Any, source: Path, tmp_path: Path
) -> None:
    """A kill may tear both, each at another line."""
    out, errors = tmp_path / "out", tmp_path / "errors"
    flags = ["-i", source, "-o", out, "-e", errors, "--on-invalid-line", "skip"]
    assert run(*flags) == 0
    wholes = out.read_bytes(), errors.read_bytes()
    assert [data.count(b"\n") for data in wholes] == [6, 3]
    rng = random.Random(2)
    for _ in range(30):
        out.write_bytes(wholes[0][: rng.randint(0, len(wholes[0]))])
        errors.write_bytes(wholes[1][: rng.randint(0, len(wholes[1]))])
        assert run(*flags, "--resume") == 0
        assert (out.read_bytes(), errors.read_bytes()) == wholes


def test_an_error_file_that_was_never_made_can_be_resumed(
    run: Any, source: Path, tmp_path: Path
) -> None:
    """The kill came before its first row."""
    out, errors = tmp_path / "out", tmp_path / "errors"
    flags = ["-i", source, "-o", out, "-e", errors, "--on-invalid-line", "skip"]
    run(*flags)
    wholes = out.read_bytes(), errors.read_bytes()
    out.write_bytes(wholes[0].splitlines(keepends=True)[0])
    errors.unlink()
    assert run(*flags, "--resume") == 0
    assert (out.read_bytes(), errors.read_bytes()) == wholes


def refused(run: Any, *arguments: object) -> str:
    """Return the words that the resume is refused with."""
    with pytest.raises(BadInput) as caught:
        run(*arguments, "--resume")
    assert caught.value.exit_status == 1
    return str(caught.value)


@pytest.mark.parametrize("change", ["edit", "insert", "remove", "swap"])
def test_an_output_of_another_input_is_refused_and_untouched(
    run: Any, write_input: Write, tmp_path: Path, change: str
) -> None:
    """One byte of one line is enough; row and line are named."""
    lines = [line(str(n)) for n in range(5)]
    out = tmp_path / "out"
    run("-i", write_input(*lines), "-o", out)
    before = out.read_bytes()
    if change == "edit":
        lines[2] = lines[2].replace('"2"', '"2 "')
    elif change == "insert":
        lines.insert(2, line("new"))
    elif change == "remove":
        del lines[2]
    else:
        lines[2], lines[3] = lines[3], lines[2]
    run.engine = None
    words = refused(run, "-i", write_input(*lines), "-o", out)
    assert words.startswith(f"row 3 of {out} (custom_id '2') does not match line 3 of the input")
    assert out.read_bytes() == before
    assert run.engine is None


def test_more_rows_than_lines_are_refused(run: Any, write_input: Write, tmp_path: Path) -> None:
    """The input was cut, or is another."""
    out = tmp_path / "out"
    run("-i", write_input(*(line(str(n)) for n in range(5))), "-o", out)
    words = refused(run, "-i", write_input(*(line(str(n)) for n in range(3))), "-o", out)
    assert words.startswith(f"row 4 of {out} (custom_id '3') does not match any line of the input")


@pytest.mark.parametrize("content", ["hello\n", "{}\n", "\n", "[1]\n"])
def test_a_file_that_is_not_an_output_is_refused(
    run: Any, source: Path, tmp_path: Path, content: str
) -> None:
    """A resume does not overwrite a file with other content."""
    out = tmp_path / "out"
    out.write_text(content)
    words = refused(run, "-i", source, "-o", out, "--on-invalid-line", "skip")
    assert f"row 1 of {out} is damaged" in words
    assert out.read_text() == content


def test_rows_in_the_middle_are_not_thrown_away_for_one_that_is_missing(
    tmp_path: Path,
) -> None:
    """The rows of one write may be run again; more missing rows mean that a file is missing."""
    raw = [RawLine(number, b"x") for number in range(1, ROWS_PER_WRITE + 5)]
    rows = [print_not_run(line.digest, None, code="c", message="m") for line in raw]
    out, errors = tmp_path / "out", tmp_path / "errors"
    out.write_bytes(b"".join(rows[:2] + rows[3:-1]))
    kept = find_kept_rows(raw, [out, errors])
    assert kept == KeptRows(b"\0\0", (len(rows[0] + rows[1]), 0))
    out.write_bytes(b"".join(rows[:2] + rows[3:]))
    with pytest.raises(BadInput, match=r"row of line 3 .* is missing from .*out and .*errors"):
        find_kept_rows(raw, [out, errors])


def test_a_retry_takes_a_corrected_line_in_the_place_of_a_failed_row(tmp_path: Path) -> None:
    """The rows may be in one file or two; a corrected line never replaces a good row."""
    raw = [RawLine(number, b"%d" % number) for number in range(1, 5)]
    good = (
        b'{"id":"%s","custom_id":"x","response":{"status_code":200,"request_id":"r","body":{}}}\n'
    )
    rows = [good % row_id_of(line.digest).encode() for line in raw]
    failed = print_not_run(raw[1].digest, None, code="c", message="m")
    out, errors = tmp_path / "out", tmp_path / "errors"
    errors.write_bytes(failed)
    corrected = [raw[0], RawLine(2, b"corrected"), *raw[2:]]
    for data, paths in (
        ((rows[0], failed, *rows[2:]), [out]),
        ((rows[0], *rows[2:]), [out, errors]),
    ):
        out.write_bytes(b"".join(data))
        kept = find_kept_rows(corrected, paths, replaces_others=True)
        assert kept.ok == b"\1\0\1\1"
        with pytest.raises(BadInput):
            find_kept_rows([RawLine(1, b"new"), *corrected[1:]], paths, replaces_others=True)
    out.write_bytes(b"".join((rows[0], failed, *rows[2:])))
    with pytest.raises(BadInput):
        find_kept_rows([raw[0], *corrected], [out], replaces_others=True)


def test_an_output_with_errors_elsewhere_is_not_resumed_without_them(
    run: Any, source: Path, tmp_path: Path
) -> None:
    """The command must be the same except for --resume."""
    out = tmp_path / "out"
    flags = ["-i", source, "-o", out, "--on-invalid-line", "skip"]
    run(*flags, "-e", tmp_path / "errors")
    assert "the output has another input, recipe or files" in refused(run, *flags)
