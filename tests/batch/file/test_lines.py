"""Lines of files written by people and programs."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file.lines import LineError, RawLine, parse_line, read_lines
from tidemill.engine_process.frames import Run, decode_frame
from tidemill.protocol.urls import MAX_INLINE_BYTES

ROOT = Path(__file__).parents[3]
GOOD = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}'


def numbered(data: bytes, **options: int) -> list[tuple[int, bytes]]:
    """Return number and bytes of the lines in `data`."""
    return [(raw.number, raw.data) for raw in read_lines(io.BytesIO(data), **options)]


def error_of(data: bytes) -> LineError:
    """Return the error of a line."""
    with pytest.raises(LineError) as caught:
        parse_line(RawLine(7, data))
    assert caught.value.line == 7
    return caught.value


def test_lines_end_at_newlines_only() -> None:
    """A bare carriage return, U+2028 and form feeds stay inside their line."""
    data = "a\rb\n\u2028c\x0cd\ne".encode()
    assert numbered(data) == [(1, b"a\rb"), (2, "\u2028c\x0cd".encode()), (3, b"e")]


def test_blank_lines_have_numbers_but_are_not_lines() -> None:
    """Lines of JSON white space are numbered and left out."""
    assert numbered(b"\n \t\r\na\n\n\nb\n\n") == [(3, b"a"), (6, b"b")]


def test_a_byte_order_mark_is_dropped_at_the_start_of_every_line() -> None:
    """Files that begin with the mark may be joined; without a line break the place is reported."""
    mark = b"\xef\xbb\xbf"
    lines = [*read_lines(io.BytesIO(mark + GOOD + b"\n" + mark + GOOD))]
    assert lines[0].data == GOOD
    assert [parse_line(line).custom_id for line in lines] == ["a", "a"]
    message = error_of(GOOD + mark + GOOD).message
    assert f"a byte order mark at byte {len(GOOD) + 1}, where files were joined" in message


def test_a_comma_after_an_object_is_reported() -> None:
    """Lines of an array that was split end in one."""
    assert error_of(GOOD + b", ").message == (
        f"a comma after the object, at byte {len(GOOD) + 1}: remove it"
    )


def test_a_file_of_a_byte_order_mark_has_no_lines() -> None:
    """A file with only the mark is empty."""
    assert numbered(b"\xef\xbb\xbf") == []


def test_a_byte_order_mark_does_not_count_for_the_limit() -> None:
    """Line 1 may be as long as others, and stays one line if it is longer."""
    assert numbered(b"\xef\xbb\xbf12345\na", max_line_bytes=5) == [(1, b"12345"), (2, b"a")]
    assert numbered(b"\xef\xbb\xbf123456\na", max_line_bytes=5) == [(1, b""), (2, b"a")]


def test_a_range_of_a_file_keeps_its_numbers() -> None:
    """Reading from line 10 on starts with number 10 and expects no byte order mark."""
    assert numbered(b"a\n\nb", first_number=10) == [(10, b"a"), (12, b"b")]


@given(st.lists(st.binary(max_size=12)), st.integers(min_value=1, max_value=10))
def test_every_byte_is_in_one_line_or_in_an_overlong_one(parts: list[bytes], limit: int) -> None:
    """Numbers, bytes and lengths agree with splitting the whole file in memory."""
    data = b"\n".join(parts)
    found = list(read_lines(io.BytesIO(data), max_line_bytes=limit, first_number=2))
    pieces = data.split(b"\n")
    expected = [
        (n, p) for n, p in enumerate(pieces, start=2) if p.strip(b" \t\r") or len(p) > limit
    ]
    assert [raw.number for raw in found] == [number for number, _ in expected]
    for raw, (_, piece) in zip(found, expected, strict=True):
        if len(piece) > limit:
            assert raw.overlong is not None
            assert raw.overlong.num_bytes == len(piece)
            assert raw.digest == RawLine(raw.number, piece).digest
        else:
            assert (raw.overlong, raw.data) == (None, piece)


def test_a_line_at_the_limit_is_read_and_one_byte_more_is_not() -> None:
    """The limit counts the line without its newline; the line after a long one is intact."""
    short, long, after = read_lines(io.BytesIO(b"12345\n123456\nabc"), max_line_bytes=5)
    assert short.data == b"12345"
    assert long.overlong is not None
    assert after == RawLine(3, b"abc")


def test_the_largest_allowed_recording_fits_into_a_line() -> None:
    """It is in base64, with a custom ID and a model name of maximum length."""
    data = "QUJD" * -(-MAX_INLINE_BYTES // 3)
    body = {"model": "m" * 512, "file_url": f"data:audio/ogg;base64,{data}"}
    fields = {"custom_id": "c" * 512, "url": "/v1/audio/transcriptions", "body": body}
    [raw] = read_lines(io.BytesIO(json.dumps(fields).encode()))
    assert parse_line(raw).body == body
    assert decode_frame(1, Run(1, 1, 0, raw.data).pack()) == Run(1, 1, 0, raw.data)


def test_a_line_of_200_megabytes_is_an_error_without_memory() -> None:
    """It is skipped in chunks by a process that may not use 200 MB."""
    code = """
import io, resource, sys
from tidemill.batch.file.lines import LineError, parse_line, read_lines

class Endless(io.RawIOBase):
    left = 200 * 2**20
    def readable(self): return True
    def readinto(self, buffer):
        size = min(len(buffer), self.left)
        buffer[:size] = b"x" * size
        self.left -= size
        return size

resource.setrlimit(resource.RLIMIT_AS, (160 * 2**20, 160 * 2**20))
[raw] = read_lines(io.BufferedReader(Endless()))
try:
    parse_line(raw)
except LineError as exc:
    print(exc.line, exc.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == (
        "1 too long: 209,715,200 bytes, and the limit is 37,748,736; split the request or raise "
        "the limit\n"
    ), done.stderr


def test_a_line_of_far_too_many_values_is_refused() -> None:
    """It would take a gigabyte of lists, and is refused without being parsed."""
    with pytest.raises(LineError) as caught:
        parse_line(RawLine(3, b'{"custom_id":"a","body":[' + b"[]," * 300_000 + b"1]}"))
    assert caught.value.message == (
        "too large: it has more than 65,536 lists and objects; split the request"
    )


def test_a_line_becomes_a_request() -> None:
    """All of its fields are used, and unknown fields are ignored."""
    line = parse_line(RawLine(3, GOOD[:-1] + b',"more":1}'))
    assert (line.number, line.custom_id, line.url) == (3, "a", "/v1/completions")
    assert line.body == {"prompt": "x"}
    assert line.request_id == f"req_{line.digest}"


def test_white_space_around_and_in_a_line_is_allowed() -> None:
    """Carriage returns are JSON white space, before the newline too."""
    assert parse_line(RawLine(1, b" " + GOOD.replace(b",", b"\r,\t") + b"\r")).custom_id == "a"


def test_a_digest_depends_on_number_and_bytes() -> None:
    """Two equal lines have different IDs, and a line has the same ID in every run."""
    assert RawLine(1, GOOD).digest == "056a3a45da5c92f6540e6d25"
    assert RawLine(2, GOOD).digest != RawLine(1, GOOD).digest
    assert RawLine(1, GOOD + b" ").digest != RawLine(1, GOOD).digest


def test_a_method_may_be_left_out() -> None:
    """POST is the only method."""
    assert parse_line(RawLine(1, GOOD.replace(b'"method":"POST",', b""))).custom_id == "a"


@pytest.mark.parametrize("method", ["GET", "post", ""])
def test_a_run_accepts_any_method(method: str) -> None:
    """The method has no effect, as in vLLM's batch runner; a batch refuses it in its validation."""
    line = parse_line(RawLine(1, json.dumps(json.loads(GOOD) | {"method": method}).encode()))
    assert (line.custom_id, line.method) == ("a", method)


@pytest.mark.parametrize("method", [None, 1, {"a": "b"}])
def test_a_method_that_is_not_a_string_is_refused(method: object) -> None:
    """The error has the method's name and its own code."""
    error = error_of(json.dumps(json.loads(GOOD) | {"method": method}).encode())
    assert (error.code, error.param, error.custom_id) == ("invalid_method", "method", "a")
    assert "must be a string" in error.message


def test_numbers_that_json_does_not_have_pass_to_the_check_of_the_body() -> None:
    """NaN fails its row with a 400, but not the whole file."""
    body = parse_line(RawLine(1, GOOD.replace(b'"x"', b"[NaN,-Infinity,1e999]"))).body
    assert [math.isnan(body["prompt"][0]), *body["prompt"][1:]] == [True, -math.inf, math.inf]


@pytest.mark.parametrize("name", ["custom_id", "url", "body"])
@pytest.mark.parametrize("missing", ["absent", "null"])
def test_a_missing_required_field_is_reported(name: str, missing: str) -> None:
    """Absent and null are the same."""
    fields = json.loads(GOOD)
    fields[name] = None
    if missing == "absent":
        del fields[name]
    error = error_of(json.dumps(fields).encode())
    assert (error.code, error.param) == ("missing_required_parameter", name)
    assert error.message.startswith(f"`{name}` is required")
    assert error.custom_id == (None if name == "custom_id" else "a")


@pytest.mark.parametrize(
    ("name", "value", "words", "code"),
    [
        ("custom_id", 7, "a string, not a number", "missing_required_parameter"),
        ("custom_id", True, "a string, not a boolean", "missing_required_parameter"),
        ("url", ["x"], "a string, not an array", "invalid_url"),
        ("body", "x", "an object, not a string", "missing_required_parameter"),
        ("body", [], "an object, not an array", "missing_required_parameter"),
    ],
)
def test_a_field_of_the_wrong_type_is_reported_with_both_types(
    name: str, value: object, words: str, code: str
) -> None:
    """The message has the expected and the actual type."""
    error = error_of(json.dumps(json.loads(GOOD) | {name: value}).encode())
    assert error.message == f"`{name}` must be {words}"
    assert (error.code, error.param) == (code, name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[1]", "not a JSON object but an array"),
        (b"null", "not a JSON object but null"),
        (b'"x"', "not a JSON object but a string"),
        (b"1.5", "not a JSON object but a number"),
        (b"hello", "not JSON: "),
        (GOOD[:-1], "not JSON: EOF"),
        (GOOD + b"}", "not JSON: trailing characters"),
        (GOOD + GOOD, "not JSON: trailing characters"),
        (b"{'custom_id': 'a'}", "not JSON: key must be a string"),
        (GOOD.replace(b"x", b"\xff"), "not UTF-8: 0xff at byte 76"),
        (GOOD.replace(b"x", b"\xed\xa0\x80"), "not UTF-8: 0xed"),
        (GOOD.decode().encode("utf-16"), "UTF-16: save the file as UTF-8"),
        (GOOD.replace(b"x", b"\0"), "a NUL byte at byte 76"),
        (GOOD + b"\0", "a NUL byte at byte "),
        (GOOD.replace(b"x", b"\x01"), "an unescaped control character at byte "),
        (GOOD.replace(b"x", b"\\ud800"), "an invalid \\u escape"),
        (GOOD.replace(b"x", b"\\udc00"), "an invalid \\u escape"),
        (GOOD.replace(b"x", b"\\ud800\\u0041"), "an invalid \\u escape"),
        (GOOD.replace(b'"x"', b"[" * 50_000 + b"]" * 50_000), "nested too deeply at byte "),
        (GOOD.replace(b'"x"', b'{"a":' * 300 + b"1" + b"}" * 300), "nested too deeply at byte "),
    ],
)
def test_an_invalid_line_has_a_clear_message(data: bytes, words: str) -> None:
    """The message says what is wrong, where, and usually what to do."""
    error = error_of(data)
    assert error.message.startswith(words)
    assert (error.code, error.param, error.custom_id) == ("invalid_json_line", None, None)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    """Any bytes give a line or a LineError."""
    for raw in read_lines(io.BytesIO(data)):
        with pytest.raises(LineError):
            parse_line(raw)


def test_valid_escapes_are_allowed() -> None:
    """Complete surrogate pairs and an escaped NUL are valid JSON."""
    prompt = parse_line(RawLine(1, GOOD.replace(b"x", b"\\ud83d\\ude00\\u0000"))).body["prompt"]
    assert prompt == "\U0001f600\0"


def test_open_files_are_streams_of_lines(tmp_path: Path) -> None:
    """An open file works like any other stream."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD + b"\n\n" + GOOD)
    with path.open("rb") as file:
        assert [parse_line(raw).number for raw in read_lines(file)] == [1, 3]
