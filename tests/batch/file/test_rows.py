"""Rows as other people's clients read them, in both dialects."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file.lines import Line, LineError
from tidemill.batch.file.rows import (
    RowError,
    RowHead,
    is_success,
    parse_row_head,
    print_malformed,
    print_not_run,
    print_reply,
    reply_body,
    row_error_message,
)
from tidemill.protocol.bodies import error_body
from tidemill.protocol.errors import ModelNotFound

DIGEST = "0123456789abcdef01234567"
LINE = Line(3, "a", "/v1/completions", {}, DIGEST, f"req_{DIGEST}")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def loads(row: bytes) -> dict[str, Any]:
    """Parse a row, which must be one line of strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert row.endswith(b"\n")
    assert row.count(b"\n") == 1
    parsed: dict[str, Any] = json.loads(row, parse_constant=refuse)
    return parsed


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
def test_a_success_is_the_same_in_both_dialects(dialect: Any) -> None:
    """The keys are in this order, nulls are written, and the JSON is compact."""
    assert (
        print_reply(LINE, 200, {"x": "é"}, dialect=dialect)
        == (
            f'{{"id":"batch_req_{DIGEST}","custom_id":"a","response":{{"status_code":200,'
            f'"request_id":"req_{DIGEST}","body":{{"x":"é"}}}},"error":null}}\n'
        ).encode()
    )


def test_a_failure_is_a_response_with_an_error_body() -> None:
    """In OpenAI's dialect `error` is null and the response's body has the error."""
    body = error_body(ModelNotFound("m", ["a", "b"]))
    assert loads(print_reply(LINE, 404, body)) == {
        "id": f"batch_req_{DIGEST}",
        "custom_id": "a",
        "response": {
            "status_code": 404,
            "request_id": f"req_{DIGEST}",
            "body": {
                "error": {
                    "message": "The model `m` does not exist. Served: a, b.",
                    "type": "not_found_error",
                    "param": "model",
                    "code": "model_not_found",
                }
            },
        },
        "error": None,
    }


def test_a_failure_in_the_dialect_of_vllm_has_no_body() -> None:
    """Its error object is next to the response."""
    body = error_body(ModelNotFound("m", ["a", "b"]))
    row = loads(print_reply(LINE, 404, body, dialect="vllm"))
    assert row["response"] == {"status_code": 404, "request_id": f"req_{DIGEST}", "body": None}
    assert row["error"] == body


def test_two_failures_of_vllm_are_plain_messages() -> None:
    """Stream mode and unknown URLs have a string as error."""
    body = {"error": {"message": "Request must not be sent in stream mode"}}
    row = loads(print_reply(LINE, 400, body, dialect="vllm", bare_message=True))
    assert row["error"] == "Request must not be sent in stream mode"
    assert row["response"]["body"] is None
    assert loads(print_reply(LINE, 400, body, bare_message=True))["response"]["body"] == body


def test_a_line_that_was_never_run_has_no_response() -> None:
    """Code and message contain the reason."""
    assert loads(print_not_run(DIGEST, "a", code="batch_expired", message="Too late.")) == {
        "id": f"batch_req_{DIGEST}",
        "custom_id": "a",
        "response": None,
        "error": {"code": "batch_expired", "message": "Too late."},
    }


def test_a_malformed_line_is_reported_by_its_number() -> None:
    """All of them share one code; the custom_id is null if the line has none."""
    error = LineError("`url` is missing", line=9, code="missing_required_parameter", param="url")
    assert loads(print_malformed(DIGEST, error)) == {
        "id": f"batch_req_{DIGEST}",
        "custom_id": None,
        "response": None,
        "error": {
            "code": "invalid_json_line",
            "message": "Line 9: `url` is missing",
            "param": "url",
            "line": 9,
        },
    }


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_any_body_prints_as_one_line_of_strict_json(body: dict[str, Any]) -> None:
    """Parsing returns the same body, with null for numbers that JSON does not have."""

    def mended(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, list):
            return [mended(item) for item in value]
        if isinstance(value, dict):
            return {key: mended(item) for key, item in value.items()}
        return value

    assert loads(print_reply(LINE, 200, body))["response"]["body"] == mended(body)


@pytest.mark.parametrize("value", ["\ud800", object()])
def test_a_body_that_json_cannot_represent_is_an_error(value: object) -> None:
    """A lone surrogate or a foreign object never reaches the file."""
    with pytest.raises(RowError):
        print_reply(LINE, 200, {"x": value})


def test_a_row_head_is_parsed() -> None:
    """It has the fields that a resume needs, for each kind of row."""
    row_id = f"batch_req_{DIGEST}"
    success = print_reply(LINE, 200, {"created": 12})
    assert parse_row_head(success) == RowHead(row_id, "a", 200, 12)
    failure = print_reply(LINE, 404, error_body(ModelNotFound("m", ["a", "b"])), dialect="vllm")
    assert parse_row_head(failure) == RowHead(row_id, "a", 404, None)
    not_run = print_not_run(DIGEST, None, code="c", message="m")
    assert parse_row_head(not_run) == RowHead(row_id, None, None, None)


def test_echoed_fields_are_not_mistaken_for_the_row() -> None:
    """They may look like a response, and like the end of a row."""
    reply = {"a": "é", "error": None, "response": {"status_code": 200}}
    row, failed = (print_reply(LINE, status, reply).decode() for status in (200, 500))
    hostile = {"x": {"a": 1, "response": {"status_code": 200, "body": {"b": {}, "error": None}}}}
    members = json.dumps(hostile, separators=(",", ":"))[1:]
    with_members = [f"{text[:-2]},{members}\n".encode() for text in (row, failed)]
    assert [*map(is_success, with_members)] == [True, False]
    assert reply_body(with_members[0]) == reply_body(row.encode())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"7", b'{"id":"x"', b'{"id":1,"custom_id":"a","response":7}']
)
def test_other_bytes_are_an_error(data: bytes) -> None:
    """Other people's files are recognised."""
    with pytest.raises(RowError):
        parse_row_head(data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"response": {"body": {"error": {"message": "a"}}}, "error": None}, "a"),
        ({"response": None, "error": {"code": "batch_expired", "message": "b"}}, "b"),
        ({"response": {"body": None}, "error": {"error": {"message": "c"}}}, "c"),
        ({"response": {"body": None}, "error": "d"}, "d"),
        ({"response": {"body": {"choices": []}}, "error": None}, None),
        ({}, None),
    ],
)
def test_a_rows_error_is_read_in_either_dialect(row: dict[str, Any], message: str | None) -> None:
    """A success has none."""
    assert row_error_message(row) == message
