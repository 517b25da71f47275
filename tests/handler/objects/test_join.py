"""Objects one behind another as one stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.batch.kinds import SealedSegment
from handler.objects.join import open_joined


@given(
    st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=8),
    st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=12),
)
def test_it_reads_and_seeks_like_one_file(
    objects: list[bytes], moves: list[tuple[bool, int]]
) -> None:
    """Reads of any length from any place give what the objects hold in a row."""
    whole = b"".join(objects)
    segments = [SealedSegment(str(index), len(data)) for index, data in enumerate(objects)]
    position = 0
    with open_joined(segments, lambda key: objects[int(key)]) as stream:
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


def test_an_object_of_another_size_is_no_segment() -> None:
    """An object that is not what was sealed breaks the stream instead of shifting the rest."""
    with (
        open_joined([SealedSegment("a", 3)], lambda _: b"four") as stream,
        pytest.raises(OSError, match="4 bytes, not 3"),
    ):
        stream.read()


def test_every_object_is_read_once_from_front_to_back() -> None:
    """A pass over the stream gets each object once."""
    asked: list[str] = []

    def get(key: str) -> bytes:
        asked.append(key)
        return b"x" * 3_000_000

    with open_joined([SealedSegment(key, 3_000_000) for key in "abc"], get) as stream:
        while stream.read(2**16):
            pass
    assert asked == ["a", "b", "c"]
