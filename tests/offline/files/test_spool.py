"""Rows that wait for earlier ones: stored next to the output and found again by their lines."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import row_id_of
from tidemill.offline.console.errors import BadInput, OutputLost
from tidemill.offline.files import spool as spool_module
from tidemill.offline.files.input_file import PlacedLine
from tidemill.offline.files.paths import spool_path
from tidemill.offline.files.spool import Row, Spool


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
    """Return where rows are spooled."""
    return spool_path(tmp_path / "out")


def add(spool: Spool, given: list[RawLine], *places: int) -> None:
    """Spool the rows of lines."""
    for place in places:
        spool.add(PlacedLine(place, given[place]), Row(row_of(given[place]), is_success=True))


@contextmanager
def loaded(path: Path, given: list[RawLine], num_done: int = 0) -> Iterator[Spool]:
    """Yield what another run finds."""
    with closing(Spool(path, len(given))) as spool:
        spool.load(given, num_done)
        yield spool


def found(path: Path, given: list[RawLine], num_done: int = 0) -> dict[int, bytes]:
    """Return the rows that another run finds, by place."""
    with loaded(path, given, num_done) as spool:
        return {place: spool.pop(place).data for place in spool.places}


def save(path: Path, given: list[RawLine], *places: int) -> None:
    """Leave what a run leaves that is stopped."""
    with loaded(path, given) as spool:
        add(spool, given, *places)
        spool.flush()


def test_rows_are_found_by_their_lines(path: Path) -> None:
    """Rows already in the output, torn rows and rows of changed lines are not found."""
    given = lines("a", "b", "c", "d")
    save(path, given, 0, 1, 2, 3)
    path.write_bytes(path.read_bytes()[:-1])
    assert found(path, given, 1) == {1: row_of(given[1]), 2: row_of(given[2])}
    assert found(path, lines("a", "b", "C", "d"), 1) == {1: row_of(given[1])}


def test_other_content_of_the_file_is_ignored(path: Path) -> None:
    """It may be any bytes."""
    [line] = lines("a")
    noise = b"\n\xff\nx\ty\n1\t{}\n1\tno row\n" + b"9" * 5000 + b"\t" + row_of(line)
    path.write_bytes(noise + b"1\t" + row_of(line))
    assert found(path, [line]) == {0: row_of(line)}


def test_a_second_stop_keeps_the_rows_of_the_first(path: Path) -> None:
    """Behind a torn end, too; the last row of a line counts."""
    given = lines("a", "b", "c", "d")
    save(path, given, 1, 2)
    path.write_bytes(path.read_bytes() + b"7\ttorn")
    with loaded(path, given) as again:
        again.pop(1)
        add(again, given, 3)
        assert "2 finished rows waiting" in again.words()
        again.flush()
    failed = row_of(given[3], 500)
    path.write_bytes(path.read_bytes() + b"%d\t" % given[3].number + failed)
    assert found(path, given, 2) == {2: row_of(given[2]), 3: failed}


@pytest.mark.parametrize("is_durable", [True, False])
def test_rows_come_back_in_any_order(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, is_durable: bool
) -> None:
    """From the buffer and from the file, which stays as small as what waits."""
    monkeypatch.setattr(spool_module, "_BUFFER_BYTES", 2_000)
    monkeypatch.setattr(spool_module, "_MAX_STALE_BYTES", 10_000)
    rng, given = random.Random(5), lines(*map(str, range(2_000)))
    with closing(Spool(path if is_durable else None, len(given))) as spool:
        todo, waiting, largest = [*range(len(given))], list[int](), 0
        while todo or waiting:
            if todo and len(waiting) < rng.randrange(20, 60):
                waiting.append(todo.pop())
                add(spool, given, waiting[-1])
            else:
                place = waiting.pop(rng.randrange(len(waiting)))
                assert spool.pop(place) == (row_of(given[place]), True)
                spool.reclaim()
            assert spool.num_waiting == spool.num_ok == len(waiting)
            largest = max(largest, spool._end - spool._live_bytes - spool._live_bytes)
        assert largest < 12_000
        spool.flush()
        spool.remove()
    assert not [*path.parent.iterdir()]


class AlmostFullFile(FileIO):
    """A file of at most `room` bytes, of which a write may store only the first ones."""

    room = 0

    def write(self, data: Any) -> int:
        """Write what there is room for; raises OSError without any."""
        if self.tell() >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[: min(50, self.room - self.tell())])


@pytest.mark.parametrize("room", [10_000, 120])
def test_a_disk_that_is_almost_full_costs_no_row(
    path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """The rows are copied to a smaller file completely, or stay in the old one."""
    monkeypatch.setattr(spool_module, "_MAX_STALE_BYTES", 1_000)
    monkeypatch.setattr(AlmostFullFile, "room", room)
    given = lines(*map(str, range(99)))
    with closing(Spool(path, len(given))) as spool:
        add(spool, given, *range(99))
        spool.flush()
        for place in range(96):
            spool.pop(place)
        size = path.stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda path, *_, **__: AlmostFullFile(path, "w+"))
            spool.reclaim()
        assert (path.stat().st_size < size) == (room > 1_000)
        assert [*path.parent.iterdir()] == [path]
        first = 96 if room > 1_000 else 0
        assert found(path, given) == {n: row_of(given[n]) for n in range(first, 99)}
        assert [spool.pop(place).data for place in (96, 97, 98)] == [*map(row_of, given[96:])]


def test_a_folder_that_takes_no_file_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows wait in a temporary file, which ends with the run."""
    given = lines("a", "b")
    with closing(Spool(tmp_path / "gone" / "out.spool", 2)) as spool:
        for place in range(2):
            add(spool, given, place)
            spool.flush()
        assert [spool.pop(place).data for place in range(2)] == [row_of(line) for line in given]
        assert spool.words() == ""
        assert not spool.is_durable
    assert capsys.readouterr().err.count("cannot be created") == 1


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    """Its rows are finished: they are not thrown away unasked."""
    path.mkdir()
    with pytest.raises(BadInput, match="contains finished rows, but cannot be read"):
        Spool(path, 0).load([], 0)


def test_a_truncated_file_ends_the_run(path: Path) -> None:
    """Only complete rows are written to an output."""
    given = lines("a", "b")
    save(path, given, 0, 1)
    with loaded(path, given) as spool:
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(OutputLost, match="changed during the run"):
            spool.pop(1)
