"""The input as a stream that outlives its connections, and its lines."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any

import pytest
from botocore.exceptions import ReadTimeoutError, ResponseStreamingError
from hypothesis import given
from hypothesis import strategies as st

from tests.emulators import Emulator
from tidemill.batch.file.lines import read_lines
from tidemill.batch.model import Source
from tidemill.handler.aws.objects.stream import LineStream, ObjectStream
from tidemill.handler.aws.sync import Aws
from tidemill.handler.errors import AwsError, NotThere, ObjectChanged

ERRORS: list[Callable[[], Exception]] = [
    lambda: ReadTimeoutError(endpoint_url="s3"),
    lambda: ResponseStreamingError(error="broken"),
    lambda: ConnectionResetError("by peer"),
    lambda: TimeoutError("slow"),
]


class Body(io.BytesIO):
    """Gives `lifetime` bytes and then breaks: with an error, or by ending."""

    def __init__(self, data: bytes, lifetime: int, error: Callable[[], Exception] | None) -> None:
        super().__init__(data)
        self._lifetime = lifetime
        self._error = error

    def read(self, size: int | None = -1, /) -> bytes:
        """Return fewer bytes than requested if the end of the connection is near."""
        assert size is not None
        data = super().read(min(size, self._lifetime))
        self._lifetime -= len(data)
        if not data and self._error is not None:
            raise self._error()
        return data


class Server:
    """Holds one object; each connection to it lives for that many bytes."""

    def __init__(
        self, data: bytes, lifetimes: list[int], error: Callable[[], Exception] | None = None
    ) -> None:
        self._data = data
        self._lifetimes = lifetimes
        self._error = error
        self.opened: list[dict[str, Any]] = []

    def open(self, **pin: Any) -> IO[bytes]:
        """Return the requested bytes; after the last lifetime connections stay open."""
        self.opened.append(pin)
        start = int(pin.get("Range", "bytes=0-")[len("bytes=") : -1])
        number = len(self.opened) - 1
        if number < len(self._lifetimes):
            return Body(self._data[start:], self._lifetimes[number], self._error)
        return io.BytesIO(self._data[start:])


def source_of(data: bytes) -> Source:
    """Return an object of this content."""
    return Source("bucket", "input/x.jsonl", '"etag"', len(data))


def read_all(stream: ObjectStream, size: int) -> bytes:
    """Return the rest of a stream."""
    pieces = []
    while piece := stream.read(size):
        assert len(piece) <= size
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("error", [None, *ERRORS])
def test_a_broken_connection_is_opened_again_where_it_stood(
    error: Callable[[], Exception] | None,
) -> None:
    """Every byte comes once, and each request is pinned to the same object."""
    data = bytes(range(256)) * 4
    server = Server(data, [10, 0, 300, 1], error)
    stream = ObjectStream(server, source_of(data), 5, sleep=lambda _: None)
    assert read_all(stream, 100) == data[5:]
    assert [pin["Range"] for pin in server.opened] == [
        f"bytes={start}-" for start in (5, 15, 15, 315, 316)
    ]
    assert all(pin["IfMatch"] == '"etag"' for pin in server.opened)


def test_tries_are_bounded_and_further_apart_each_time() -> None:
    """A connection that never gives a byte ends in an error that says where."""
    delays: list[float] = []
    server = Server(b"x" * 10, [3, *[0] * 20])
    stream = ObjectStream(server, source_of(b"x" * 10), sleep=delays.append)
    assert stream.read(10) == b"xxx"
    with pytest.raises(AwsError, match="at byte 3"):
        stream.read(10)
    assert len(delays) == 5
    assert delays == sorted(delays)


def test_nothing_is_requested_beyond_the_end() -> None:
    """S3 would reply with an error to a range that begins there."""
    server = Server(b"xyz", [])
    assert ObjectStream(server, source_of(b"xyz"), 3).read(10) == b""
    assert ObjectStream(server, source_of(b""), 0).read(10) == b""
    assert server.opened == []


def put(emulator: Emulator, bucket: str, data: bytes) -> Source:
    """Upload an object and pin it, as one in a bucket without versions."""
    s3 = emulator.client("s3")
    etag = s3.put_object(Bucket=bucket, Key="input/x.jsonl", Body=data)["ETag"]
    return Source(bucket, "input/x.jsonl", etag, len(data))


def test_an_object_of_a_bucket_is_read_from_anywhere(emulator: Emulator) -> None:
    """It is read from the beginning and from the middle, in pieces."""
    aws, bucket = Aws(emulator.client), emulator.create().bucket
    data = bytes(range(256)) * 1000
    source = put(emulator, bucket, data)
    for start in (0, 1, 100_000, len(data)):
        stream = ObjectStream(aws, source, start)
        assert read_all(stream, 65_536) == data[start:]
        stream.close()


def test_an_object_that_is_no_longer_the_pinned_one_is_not_read(emulator: Emulator) -> None:
    """Changed content and a missing object raise different errors, also at a later request."""
    aws, bucket = Aws(emulator.client), emulator.create().bucket
    source = put(emulator, bucket, b"first")
    put(emulator, bucket, b"other")
    for start in (0, 2):
        with pytest.raises(ObjectChanged):
            ObjectStream(aws, source, start).read(10)
    emulator.client("s3").delete_object(Bucket=bucket, Key=source.key)
    with pytest.raises(NotThere):
        ObjectStream(aws, source).read(10)


def test_a_version_is_read_though_a_newer_one_is_there(emulator: Emulator) -> None:
    """In a versioned bucket, an upload does not disturb the reading of an older version."""
    aws, bucket = Aws(emulator.client), emulator.create().bucket
    s3 = emulator.client("s3")
    first = s3.put_object(Bucket=bucket, Key="input/x.jsonl", Body=b"first")
    source = replace(put(emulator, bucket, b"other"), etag=first["ETag"])
    source = replace(source, version_id=first["VersionId"])
    assert ObjectStream(aws, source).read(10) == b"first"


@given(
    st.text("ab\n", max_size=60).map(str.encode), st.integers(1, 8), st.integers(1, 9), st.data()
)
def test_lines_are_those_of_a_file(
    data: bytes, chunk_bytes: int, size: int, draw: st.DataObject
) -> None:
    """With any chunks, `readline` returns the lines of a file, and `tell` their positions."""
    lines = LineStream(io.BytesIO(data), chunk_bytes=chunk_bytes)
    expected = io.BytesIO(data)
    while piece := expected.readline(size):
        assert lines.readline(size) == piece
        assert lines.tell() == expected.tell()
        whole = data[: expected.tell()].rfind(b"\n") + 1
        assert lines.end == whole
        assert lines.num_lines == data[:whole].count(b"\n")
        assert lines.line_start == data[: expected.tell() - 1].rfind(b"\n") + 1
        size = draw.draw(st.integers(1, 9))
    assert lines.readline(size) == b""


@given(st.text("ab\n", max_size=60).map(str.encode), st.integers(1, 8), st.integers(0, 60))
def test_lines_end_before_the_one_that_begins_behind_a_place(
    data: bytes, chunk_bytes: int, stop: int
) -> None:
    """The line that contains that place is whole, however long it is."""
    lines = LineStream(io.BytesIO(data), stop=stop, chunk_bytes=chunk_bytes)
    # The limit is that of the shortest lines, so that others are skipped.
    found = [
        (raw.number, lines.line_start, lines.tell(), raw.data)
        for raw in read_lines(lines, max_line_bytes=4)
    ]
    expected = []
    position = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        text = line.rstrip(b"\n")
        if text and position < stop:
            shown = text if len(text) <= 4 else b""
            expected.append((number, position, position + len(line), shown))
        position += len(line)
    assert found == expected
