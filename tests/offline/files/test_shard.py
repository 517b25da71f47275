"""Shards of an input: every line is in one of them, as it is in the whole file."""

from __future__ import annotations

import argparse
import io
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file.formats import FileFormat
from tidemill.offline.files.input_file import InputFile
from tidemill.offline.files.shard import Shard, find_shard_lines, parse_shard
from tidemill.offline.files.source import Source
from tidemill.offline.plan.line_index import LineIndex

# Their lengths differ, so that few are cut, torn, blank or too long in one way only.
pieces = st.sampled_from([b"\n", b" ", b"\r", b"a", b"{}", b"\xef\xbb\xbf", b"0123456789" * 3])


@given(st.lists(pieces, max_size=30).map(b"".join), st.integers(1, 12))
def test_shards_have_together_the_lines_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, count: int
) -> None:
    """For any bytes and any count: the same lines, numbers, digests and places, in order."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    with path.open("rb") as file:
        whole = InputFile(Source(file, "any", 0), FileFormat(), max_line_bytes=20)
        shards = [whole.select(Shard(number, count)) for number in range(1, count + 1)]
        lines = [placed for shard in shards for placed in shard.placed_lines()]
        assert lines == [*whole.placed_lines()]
    parts = [shard.part for shard in shards]
    firsts = [part.first for part in parts if part is not None]
    assert [part.end for part in parts[:-1] if part is not None] == firsts[1:]


def test_a_shard_reads_no_further_than_its_end() -> None:
    """Earlier lines are counted in blocks."""
    lines = [b"%d\n" % number for number in range(1_000_000, 1_400_000)]
    file = io.BytesIO(b"".join(lines))
    found = find_shard_lines(file, len(lines) * 8, Shard(2, 4))
    assert (found.first.number, found.end.number) == (100_001, 200_001)
    assert file.tell() == 200_000 * 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a/b", "is not a valid shard: use 3/8 for the third of eight"),
        ("/", "is not a valid shard: use 3/8"),
        ("3", "is not a valid shard: use 3/8"),
        ("-1/4", "is not a valid shard: use 3/8"),
        ("1/0", "is not a valid shard: the number of shards must be at least 1"),
        ("0/4", "is not a valid shard: use 1/4 to 4/4"),
        ("5/4", "is not a valid shard: use 1/4 to 4/4"),
        ("2/1", "is not a valid shard: use 1/1"),
    ],
)
def test_a_shard_that_is_none_is_refused(text: str, words: str) -> None:
    """An unset Slurm variable gives such a value."""
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        parse_shard(text)
    assert parse_shard("3/8") == Shard(3, 8)


def test_packed_inputs_are_cut_as_their_plain_lines(tmp_path: Path) -> None:
    """An array's elements are numbered as in the whole."""
    path = tmp_path / "in.json"
    path.write_bytes(b'[{"a": 1}, {"b": [2]},\n {"c": 3}]')
    with path.open("rb") as file, ExitStack() as stack:
        packed = InputFile.from_source(Source(file, "in", 0), 100).unpack(tmp_path, stack)
        lines = [[*packed.select(Shard(number, 2)).lines()] for number in (1, 2)]
        assert [raw.number for raw in (*lines[0], *lines[1])] == [1, 2, 3]
        assert all(lines)


def test_lines_are_read_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines in file order are read in blocks, also if one is longer than a block or the limit."""
    monkeypatch.setattr("tidemill.offline.files.input_file._BLOCK_BYTES", 64)
    path, sizes = tmp_path / "in.jsonl", [10, 20, 3, 90, 7, 200, 1, 30, 62, 63, 64, 5]
    path.write_bytes(b"\n".join(b"%d" % (size % 10) * size for size in sizes))
    with path.open("rb") as file, closing(LineIndex(tmp_path)) as index:
        whole = InputFile(Source(file, "any", 0), FileFormat(), max_line_bytes=100)
        lines = []
        for raw, start in whole.placed_lines():
            index.add(start, raw.num_bytes, raw.number)
            lines.append(raw)
        assert lines[5].overlong is not None
        orders = [[*range(12)], [*range(11, -1, -1)], [0, 11, 3, 4, 5, 6, 2, 8, 9, 10, 1, 7]]
        for order in orders:
            found = [*whole.read(index, order)]
            assert found == [(place, lines[place]) for place in order]
