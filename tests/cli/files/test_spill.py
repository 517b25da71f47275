"""Rows that wait for their order: kept beside the output, and taken up by their lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import row_id_of
from tidemill.cli.console.errors import BadInput
from tidemill.cli.files.spill import Spill, spill_path


def lines(*texts: str) -> list[RawLine]:
    """Return lines with blank ones between, as an input may have."""
    return [RawLine(2 * place + 1, text.encode()) for place, text in enumerate(texts)]


def row_of(line: RawLine, status_code: int = 200) -> bytes:
    """Return the row of a line."""
    response = {"status_code": status_code, "body": {"created": 7}}
    row = {"id": row_id_of(line.digest), "custom_id": "c", "response": response}
    return f"{json.dumps(row)}\n".encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where rows are spilled."""
    return spill_path(tmp_path / "out")


def loaded(path: Path, given: list[RawLine], num_done: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield what another run takes up: places and rows."""
    spill = Spill(path)
    spill.load(given, num_done)
    for place, spilled in spill.spilled.items():
        yield place, spilled.row


def test_rows_are_found_by_their_lines(path: Path) -> None:
    """Not those that are in the output by then, nor what is torn or of a line that has changed."""
    given = lines("a", "b", "c", "d")
    Spill(path).save([(line.number, row_of(line)) for line in given])
    path.write_bytes(path.read_bytes()[:-1])
    assert [*loaded(path, given, 1)] == [(1, row_of(given[1])), (2, row_of(given[2]))]
    assert [*loaded(path, lines("a", "b", "C", "d"), 1)] == [(1, row_of(given[1]))]


def test_what_else_stands_in_the_file_is_passed_over(path: Path) -> None:
    """Whatever that is."""
    [line] = lines("a")
    noise = b"\n\xff\nx\ty\n1\t{}\n1\tno row\n" + b"9" * 5000 + b"\t" + row_of(line)
    path.write_bytes(noise + b"1\t" + row_of(line))
    assert [*loaded(path, [line])] == [(0, row_of(line))]


def test_a_second_stop_keeps_the_rows_of_the_first(path: Path) -> None:
    """Those that are in the output by then are forgotten."""
    given = lines("a", "b", "c", "d")
    rows = [row_of(line) for line in given]
    Spill(path).save([(given[1].number, rows[1]), (given[2].number, rows[2])])
    again = Spill(path)
    again.load(given, 0)
    del again.spilled[1]
    again.save([(given[3].number, rows[3])])
    assert [*loaded(path, given)] == [(2, rows[2]), (3, rows[3])]
    assert "2 finished rows that wait" in again.words()


def test_the_file_stays_as_small_as_what_waits(path: Path) -> None:
    """Whatever has passed through it; where nothing waits there is none."""
    line = RawLine(1, b"a")
    row = row_of(line)
    spill = Spill(path)
    for number in range(0, 40_000, 100):
        spill.save([(number + offset, row) for offset in range(100)])
    assert path.stat().st_size < 2**20 + 250 * len(row)
    spill.save([])
    assert not path.exists()
    assert spill.words() == ""


def test_a_folder_that_takes_no_file_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on as it would without."""
    spill = Spill(tmp_path / "gone" / "out.spill")
    for _ in range(2):
        spill.save([(1, b"row\n")])
    spill.remove()
    assert capsys.readouterr().err.count("cannot be written") == 1
    assert spill.words() == ""


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    """Its rows are finished: they are not thrown away unasked."""
    path.mkdir()
    with pytest.raises(BadInput, match="holds finished rows and cannot be read"):
        Spill(path).load([], 0)
