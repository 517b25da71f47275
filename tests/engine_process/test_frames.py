"""Frames are read from a pipe as they were written, and invalid ones are reported."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine_process import frames
from tidemill.engine_process.frames import (
    Abort,
    Answer,
    AnswerKind,
    Ask,
    Failed,
    Fetched,
    Frame,
    FrameError,
    FrameReader,
    FrameWriter,
    Ready,
    Row,
    Run,
    Stats,
    decode_frame,
    encode_frame,
)
from tidemill.protocol.contract import EngineInfo, EngineStats, Usage

COUNTS = st.integers(0, 2**64 - 1)
TIMES = st.integers(-(2**63), 2**63 - 1)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, st.floats(0, 10**6), COUNTS)
WORDS = st.text(st.characters(), max_size=20)  # including lone surrogates: an error may quote them
FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Run, COUNTS, COUNTS, TIMES, st.binary()),
    st.builds(Abort, COUNTS),
    st.builds(Row, COUNTS, st.booleans(), USAGES, st.binary()),
    st.builds(
        Ready,
        st.builds(
            EngineInfo,
            WORDS,
            st.none() | WORDS,
            WORDS,
            WORDS,
            COUNTS,
            COUNTS,
            *[st.lists(WORDS).map(tuple)] * 3,
            st.dictionaries(WORDS, st.floats(0, 1e6)),
        ),
    ),
    st.builds(Stats, st.builds(EngineStats, COUNTS, COUNTS, st.floats(0, 1), *[COUNTS] * 5)),
    st.builds(Failed, WORDS, WORDS),
    st.builds(Fetched, st.dictionaries(WORDS, WORDS)),
    st.builds(Ask, COUNTS, TIMES, st.booleans(), st.binary()),
    st.builds(Answer, COUNTS, st.sampled_from(AnswerKind), st.binary()),
)


async def read_all(pieces: list[bytes]) -> list[Frame]:
    """Return the frames of a pipe that brings these pieces and ends."""
    stream = asyncio.StreamReader()
    reader = FrameReader(stream)

    async def feed() -> None:
        for piece in pieces:
            stream.feed_data(piece)
            await asyncio.sleep(0)
        stream.feed_eof()

    feeding = asyncio.create_task(feed())
    frames = list[Frame]()
    try:
        while some := await reader.read():
            frames += some
    finally:
        await feeding
    return frames


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Return the data in pieces."""
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 2**20), max_size=6))
def test_frames_are_read_as_written(sent: list[Frame], places: list[int]) -> None:
    """It holds however the pipe splits them."""
    data = b"".join(map(encode_frame, sent))
    assert asyncio.run(read_all(cut(data, places))) == sent


@given(FRAMES, st.integers(1, 2**20))
def test_a_truncated_frame_is_an_error_wherever_it_is_cut(frame: Frame, place: int) -> None:
    """A killed process may leave half a frame; complete ones before it are read."""
    data = encode_frame(frame)
    torn = data[: 1 + place % (len(data) - 1)]

    async def read() -> None:
        stream = asyncio.StreamReader()
        reader = FrameReader(stream)
        stream.feed_data(data + torn)
        stream.feed_eof()
        assert await reader.read() == [frame]
        with pytest.raises(FrameError, match=r"truncated frame: the pipe ended after [\d,]+ of"):
            await reader.read()

    asyncio.run(read())


async def test_frames_of_one_turn_are_written_and_read_together() -> None:
    """A call of the system costs more than a frame; frames before an invalid one are read."""
    pieces = list[bytes]()
    pipe = SimpleNamespace(write=pieces.append, is_closing=lambda: False, close=lambda: None)
    writer = FrameWriter(cast("asyncio.StreamWriter", pipe))
    for ticket in (1, 2):
        writer.write(Abort(ticket))
    await asyncio.sleep(0)
    writer.write(Abort(3))
    writer.close()
    assert pieces == [encode_frame(Abort(1)) + encode_frame(Abort(2)), encode_frame(Abort(3))]
    stream = asyncio.StreamReader()
    reader = FrameReader(stream)
    stream.feed_data(b"".join(pieces) + struct.pack("!IB", 0, 99))
    assert await reader.read() == [Abort(1), Abort(2), Abort(3)]
    with pytest.raises(FrameError, match="unknown frame kind 99"):
        await reader.read()


@given(st.integers(0, 255), st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_a_frame_error(kind: int, payload: bytes) -> None:
    """It holds for any data that another program may have written."""
    try:
        frame = decode_frame(kind, payload)
    except FrameError:
        return
    assert encode_frame(frame)[4] == kind


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        (0, b"", "unknown frame kind 0"),
        (99, b"{}", "unknown frame kind 99"),
        (1, b"short", "invalid Run frame"),
        (2, b"123456789", "invalid Abort frame"),
        (3, b"short", "invalid Row frame"),
        (4, b"{}", "invalid Ready frame"),
        (5, b'{"steps": 1, "wrong": 2}', "invalid Stats frame"),
        (6, b"no json", "invalid Failed frame"),
        (6, b"[]", "invalid Failed frame"),
        (6, b"\xff", "invalid Failed frame"),
    ],
)
def test_an_invalid_frame_is_named(kind: int, payload: bytes, words: str) -> None:
    """The error names the kind, which shows where to look."""
    with pytest.raises(FrameError, match=words):
        decode_frame(kind, payload)


async def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    """A stray `print` into the pipe must not make the reader wait for 2 GB."""
    with pytest.raises(FrameError, match="too long"):
        await read_all([b"Loading weights: 100%\n"])
    with pytest.raises(FrameError, match="too long"):
        await read_all([struct.pack("!IB", frames.MAX_PAYLOAD_BYTES + 1, 1)])


def test_a_frame_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side would treat it as invalid."""
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 24 + 10)
    assert encode_frame(Run(1, 1, 1, b"x" * 10))
    with pytest.raises(FrameError, match="35 bytes is too long: the limit is 34"):
        encode_frame(Run(1, 1, 1, b"x" * 11))
