"""Parts and seals: durable rows and their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from tidemill.batch.errors import BadPart
from tidemill.batch.file.expected_tokens import NO_TOKENS
from tidemill.batch.file.lines import Line
from tidemill.batch.file.rows import print_reply
from tidemill.batch.parts import (
    FinishedRow,
    PartIndex,
    decode_index,
    decode_seal,
    encode_part,
    encode_seal,
)
from tidemill.protocol.contract import Usage

ROWS = st.builds(
    FinishedRow,
    line=st.integers(1, 60),
    row=st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" ") + b"\n"),
    is_success=st.booleans(),
    usage=st.builds(
        Usage,
        prompt_tokens=st.integers(0, 10**9),
        cached_tokens=st.integers(0, 9),
        completion_tokens=st.integers(0, 9),
        audio_seconds=st.floats(0, 36_000),
        reasoning_tokens=st.integers(0, 9),
    ),
    expected=st.just(NO_TOKENS),
    is_reused=st.booleans(),
    is_draft=st.sampled_from([False]),  # drafts have separate objects
    has_escalation_error=st.booleans(),
)
PARTS = st.lists(
    st.lists(ROWS, min_size=1, max_size=12, unique_by=lambda row: row.line), max_size=6
)


def index_of(parts: list[list[FinishedRow]]) -> tuple[PartIndex, dict[str, bytes]]:
    """Return the index of parts under the keys a, b, …, and their bytes."""
    objects = {chr(ord("a") + number): encode_part(rows) for number, rows in enumerate(parts)}
    index = PartIndex()
    for key, data in objects.items():
        index.add(key, decode_index(data))
    return index, objects


@given(st.lists(ROWS, max_size=12, unique_by=lambda row: row.line))
def test_a_part_has_the_place_of_each_row(rows: list[FinishedRow]) -> None:
    """The rows are in line order, with their usage."""
    data = encode_part(rows)
    places = decode_index(data)
    found = [
        FinishedRow(
            place.line,
            data[place.start : place.end],
            place.is_success,
            place.usage,
            is_reused=place.is_reused,
            has_escalation_error=place.has_escalation_error,
        )
        for place in places
    ]
    assert found == sorted(rows, key=lambda row: row.line)


@given(st.lists(ROWS, min_size=1, max_size=5, unique_by=lambda row: row.line), st.data())
def test_a_torn_part_is_refused(rows: list[FinishedRow], data: st.DataObject) -> None:
    """It is refused if it is truncated anywhere, or longer."""
    part = encode_part(rows)
    with pytest.raises(BadPart):
        decode_index(part[: data.draw(st.integers(0, len(part) - 1))])
    with pytest.raises(BadPart):
        decode_index(part + b"x")


@pytest.mark.parametrize(
    "data", [b"", b"x", b"[]", b"{}", b'{"rows": 7}\n', b'{"rows": [[1]]}\n', b"\xff\n"]
)
def test_foreign_bytes_are_not_a_part(data: bytes) -> None:
    """The bytes under a part's key may be anything."""
    with pytest.raises(BadPart):
        decode_index(data)


@pytest.mark.parametrize(
    "rows",
    [
        [None],
        [[]],
        [[7, 8, 1, 0, 0]],
        [[7, 8, 1, 0, 0, 0, 0]],
        [[[7], 8, 1, 0, 0, 0]],
        [["7", 8, 1, 0, 0, 0]],
        [[7, 8.0, 1, 0, 0, 0]],
        [[7, 8, 2, 0, 0, 0]],
        [[7, 8, 1, 0, None, 0]],
        [[7, 8, 1, 0, 0, 0.5]],
        [[6, -8, 1, 0, 0, 0], [7, 16, 1, 0, 0, 0]],
    ],
)
def test_a_head_of_another_shape_is_not_a_part(rows: object) -> None:
    """It is JSON with this format's name, and its sizes may add up."""
    with pytest.raises(BadPart):
        decode_index(to_json({"format": 1, "rows": rows}) + b'\n{"a":1}\n')


@pytest.mark.parametrize("name", [2, "1", None])
def test_a_part_of_another_format_is_ignored(name: object) -> None:
    """A later version's parts count as missing: their lines run again."""
    rows = [[7, 8, 1, 0, 0, 0]]
    assert decode_index(to_json({"format": 1, "rows": rows}) + b'\n{"a":1}\n')
    with pytest.raises(BadPart):
        decode_index(to_json({"format": name, "rows": rows}) + b'\n{"a":1}\n')


@given(PARTS, st.integers(1, 200))
def test_a_seal_holds_each_line_once_and_in_order(
    parts: list[list[FinishedRow]], segment_bytes: int
) -> None:
    """The first part with a row wins; successes and failures are separate."""
    index, objects = index_of(parts)
    first: dict[int, FinishedRow] = {}
    for rows in parts:
        for row in rows:
            first.setdefault(row.line, row)
    seal = index.seal(segment_bytes)
    for segments, is_success in ((seal.output, True), (seal.errors, False)):
        bodies = [
            b"".join(objects[key][start:end] for key, start, end in segment.slices)
            for segment in segments
        ]
        expected = [
            first[line].row for line in sorted(first) if first[line].is_success == is_success
        ]
        assert b"".join(bodies) == b"".join(expected)
        assert [len(body) for body in bodies] == [segment.num_bytes for segment in segments]
        assert all(len(body) >= segment_bytes for body in bodies[:-1])
        pairs = [pair for segment in segments for pair in segment.rows]
        assert [line for line, _ in pairs] == [
            line for line in sorted(first) if first[line].is_success == is_success
        ]
        assert [size for _, size in pairs] == [len(row) for row in expected]
        assert all(
            sum(size for _, size in segment.rows) == segment.num_bytes for segment in segments
        )
    assert index.lines == set(first)
    assert len(index) == len(first)


@given(PARTS, st.integers(1, 200))
def test_a_seals_rows_are_in_a_separate_index(
    parts: list[list[FinishedRow]], segment_bytes: int
) -> None:
    """They are listed by segment; other bytes are refused."""
    seal = index_of(parts)[0].seal(segment_bytes)
    index = decode_seal(encode_seal(seal))
    for segments, rows in ((seal.output, index.output), (seal.errors, index.errors)):
        assert [list(segment.rows) for segment in segments] == rows
    assert index.truncated == list(seal.truncated)
    for other in (encode_seal(seal)[:-1], b"", b"{}", encode_part(parts[0] if parts else [])):
        with pytest.raises(BadPart):
            decode_seal(other)


@given(PARTS)
def test_counts_are_those_of_the_winning_rows(parts: list[list[FinishedRow]]) -> None:
    """They never decrease when a part is added, and a repeated line counts once."""
    index, before = PartIndex(), 0
    for number, rows in enumerate(parts):
        index.add(str(number), decode_index(encode_part(rows)))
        progress = index.progress()
        assert progress.num_rows == len(index) >= before
        before = progress.num_rows
    assert index.progress().num_rows == len({row.line for rows in parts for row in rows})


def answered(line: int, *finish_reasons: str) -> FinishedRow:
    """Return the row of an answer with these finish reasons."""
    choices = [{"finish_reason": reason} for reason in finish_reasons]
    body = {"id": "x", "choices": choices, "text": '{"finish_reason":"length"}'}
    row = print_reply(Line(line, "a", "/v1/chat/completions", {}, "d" * 24, "req_d"), 200, body)
    return FinishedRow(line, row, is_success=True)


def test_truncated_answers_are_counted_once_per_line() -> None:
    """A part lists them; a part of an earlier version has no such list."""
    rows = [answered(1, "stop"), answered(2, "length"), answered(3, "stop", "length")]
    part = encode_part([*rows, FinishedRow(4, b'"finish_reason":"length"\n', is_success=False)])
    places = decode_index(part)
    assert [place.is_truncated for place in places] == [False, True, True, False]
    index = PartIndex()
    index.add("a", places)
    index.add("b", decode_index(encode_part([answered(2, "length"), answered(5, "length")])))
    assert (index.progress().num_rows, index.progress().truncated) == (5, 3)
    earlier = part.replace(b',"truncated":[2,3]', b"")
    assert len(earlier) < len(part)
    assert not any(place.is_truncated for place in decode_index(earlier))
    later = part.replace(b'"truncated":', b'"of_a_later_version":')
    assert [place.line for place in decode_index(later)] == [1, 2, 3, 4]
