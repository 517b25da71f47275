"""Objects one behind another as one stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.parts import Slice
from tidemill.handler.aws.objects.join import open_joined


@given(
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=50), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=12),
)
def test_it_reads_and_seeks_like_one_file(
    given_slices: list[tuple[bytes, int, int]], moves: list[tuple[bool, int]]
) -> None:
    """Reads of any length from any place give what the slices hold in a row."""
    objects = [data for data, _, _ in given_slices]
    slices = [
        Slice(str(index), min(left_out, len(data) - 1), max(len(data) - cut, 1))
        for index, (data, left_out, cut) in enumerate(given_slices)
    ]
    slices = [piece for piece in slices if piece.start < piece.end]
    whole = b"".join(objects[int(key)][start:end] for key, start, end in slices)
    position = 0
    with open_joined(slices, lambda each: objects[int(each.key)][each.start : each.end]) as stream:
        for is_seek, number in moves:
            if is_seek:
                position = number % (len(whole) + 1)
                assert stream.seek(position) == position
            else:
                assert stream.read(number) == whole[position : position + number]
                position = min(len(whole), position + number)
        stream.seek(0, 2)
        assert stream.tell() == len(whole)
        stream.seek(0)
        assert stream.read() == whole


def test_an_object_that_ends_early_is_refused() -> None:
    """A truncated object breaks the stream instead of shifting the rest."""
    with (
        open_joined([Slice("a", 1, 5)], lambda _: b"six"[1:5]) as stream,
        pytest.raises(OSError, match="a has no bytes 1 to 5"),
    ):
        stream.read()


def test_every_slice_is_read_once_from_front_to_back() -> None:
    """A pass over the stream gets each slice once."""
    keys: list[str] = []

    def get(piece: Slice) -> bytes:
        keys.append(piece.key)
        return b"x" * 3_000_000

    with open_joined([Slice(key, 0, 3_000_000) for key in "abc"], get) as stream:
        while stream.read(2**16):
            pass
    assert keys == ["a", "b", "c"]
