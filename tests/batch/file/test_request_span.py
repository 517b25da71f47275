"""Attributes of a request's span, from its line and its row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.request_span import trace_request
from tidemill.net.tracing import Attributes
from tidemill.protocol.contract import Usage

SECRET = "the patient's name"


class Recorder:
    """A span that records what it is given."""

    def __init__(self, *, captures_content: bool = False) -> None:
        self.captures_content = captures_content
        self.requests: list[tuple[str, Attributes, str | None]] = []

    def takes(self, *, is_success: bool) -> bool:
        """Take every request."""
        return is_success in {True, False}

    def add_request(
        self, name: str, _started_ns: int, attributes: Attributes, error_type: str | None
    ) -> None:
        """Record the request."""
        self.requests.append((name, attributes, error_type))

    def end(self, attributes: Attributes, error_type: str | None = None) -> None:
        """Do nothing."""


def traced(
    line: object, row: object, usage: Usage | None = None, *, is_success: bool = True, **more: Any
) -> tuple[str, dict[str, Any], str | None]:
    """Return name, attributes and error of the span of a line and its row."""
    data, printed = (
        each if isinstance(each, bytes) else json.dumps(each).encode() for each in (line, row)
    )
    given = {name: more.pop(name) for name in ("with_defaults",) if name in more}
    span = Recorder(**more)
    raw = RawLine(7, data)
    trace_request(span, raw, printed, usage, is_success=is_success, started_ns=1, **given)
    [(name, attributes, error_type)] = span.requests
    return name, dict(attributes), error_type


def chat(**body: Any) -> dict[str, Any]:
    """Return a line whose prompt is a secret."""
    body = {"model": "m", "messages": [{"role": "user", "content": SECRET}], **body}
    return {"custom_id": SECRET, "url": "/v1/chat/completions", "body": body}


def replied(*, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """Return a row whose reply repeats the secret."""
    message = {"role": "assistant", "content": SECRET, **message}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    body = {"id": "chatcmpl-1", "model": "m-2", "choices": choices}
    return {"custom_id": SECRET, "response": {"status_code": 200, "body": body}, "error": None}


def test_a_chat_has_the_conventions_attributes() -> None:
    """They are parameters, IDs, tokens and finish reasons, without message content."""
    line = chat(temperature=0.5, max_tokens=9, n=2, seed=1, stop=[SECRET], top_k=True, user=SECRET)
    name, attributes, error_type = traced(line, replied(), Usage(10, 4, 3))
    assert (name, error_type) == ("chat m", None)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tidemill",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 1,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m-2",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "tidemill.line": 7,
    }


def test_defaults_of_a_run_are_included() -> None:
    """They are the parameters that the line ran with."""
    given = traced(chat(), replied(), with_defaults=lambda _, body: {**body, "temperature": 0.0})
    assert given[1]["gen_ai.request.temperature"] == 0


def test_messages_are_included_on_request() -> None:
    """They are split into parts; an image has only its type."""
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    content = [{"type": "text", "text": "What?"}, image]
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    _, attributes, _ = traced(
        chat(messages=[{"role": "user", "content": content}]),
        replied(finish_reason="tool_calls", tool_calls=[call], reasoning_content="Hm."),
        captures_content=True,
    )
    inputs, given = (
        json.loads(attributes[f"gen_ai.{side}.messages"]) for side in ("input", "output")
    )
    text = {"type": "text", "content": "What?"}
    assert inputs == [{"role": "user", "parts": [text, {"type": "image_url"}]}]
    assert given == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "Hm."},
                {"type": "text", "content": SECRET},
                {"type": "tool_call", "id": "c1", "name": "f", "arguments": "{}"},
            ],
            "finish_reason": "tool_calls",
        }
    ]


@pytest.mark.parametrize(
    ("kind", "field"), [("function_call", "arguments"), ("custom_tool_call", "input")]
)
def test_items_of_a_response_are_messages(kind: str, field: str) -> None:
    """Its status is the finish reason; a custom tool's input is its arguments."""
    call = {"type": kind, "call_id": "c1", "name": "f", field: "{}"}
    output = {"type": f"{kind}_output", "call_id": "c1", "output": "5"}
    user = {"role": "user", "content": [{"type": "input_text", "text": "What?"}]}
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
    ]
    body = {"input": [user, call, output], "instructions": "Be brief.", "max_output_tokens": 9}
    row = {"response": {"body": {"status": "incomplete", "output": items}}}
    line = {"url": "/v1/responses", "body": body}
    name, attributes, _ = traced(line, row, captures_content=True)
    assert name == attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert attributes["gen_ai.response.finish_reasons"] == ["incomplete"]
    inputs, given = (
        json.loads(attributes[f"gen_ai.{side}.messages"]) for side in ("input", "output")
    )
    called = {"type": "tool_call", "id": "c1", "name": "f", "arguments": "{}"}
    assert inputs == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "What?"}]},
        {"role": "assistant", "parts": [called]},
        {"role": "tool", "parts": [{"type": "text", "content": "5"}]},
    ]
    assert given == [
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "Hm."}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "I look."}]},
        {"role": "assistant", "parts": [called]},
    ]
    _, attributes, _ = traced({**line, "body": {"input": "Hi"}}, row, captures_content=True)
    [shown] = json.loads(attributes["gen_ai.input.messages"])
    assert shown == {"role": "user", "parts": [{"type": "text", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("response", "error", "expected"),
    [
        ({"status_code": 400, "body": {"error": {"message": SECRET, "code": "c"}}}, None, "c"),
        ({"status_code": 400, "body": {"error": {"message": SECRET, "type": "t"}}}, None, "t"),
        ({"status_code": 400, "body": None}, SECRET, "400"),
        ({"status_code": 404, "body": None}, {"error": {"type": "NF", "code": 404}}, "NF"),
        (None, {"code": "invalid_json_line", "message": SECRET}, "invalid_json_line"),
        (None, None, "_OTHER"),
    ],
)  # fmt: skip
def test_an_error_is_reported_by_its_code(response: object, error: object, expected: str) -> None:
    """Its message may quote the request."""
    row = {"response": response, "error": error}
    name, attributes, error_type = traced(chat(), row, is_success=False)
    assert (name, error_type) == ("chat m", expected)
    assert SECRET not in str(attributes)


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b"[" * 5000, {"body": 1}, {"url": 2}])
def test_a_line_that_cannot_be_parsed_has_a_span(line: object) -> None:
    """Its content does not matter."""
    name, attributes, _ = traced(line, b"nothing either", is_success=False)
    assert name == attributes["gen_ai.operation.name"] == "unknown"


@pytest.mark.parametrize("value", [None, 1, True, "x", [], [1], [[]], {}, {"a": 1}])
@pytest.mark.parametrize(
    "field", ["messages", "prompt", "model", "temperature", "n", "tool_calls", "choices"]
)
def test_values_of_any_kind_are_harmless(field: str, value: object) -> None:
    """A span contains only values of supported types."""
    message = {"role": value, "content": value, "tool_calls": value}
    row = {"response": {"body": {field: value, "choices": [{"message": message, "text": value}]}}}
    for line in (chat(**{field: value}), chat(messages=[message, {"content": [{"text": value}]}])):
        name, _, _ = traced(line, row, captures_content=True)
        assert name.startswith("chat")


def test_a_long_line_is_not_parsed() -> None:
    """Parsing would block the loop; its tokens are known anyway."""
    line = chat(messages=[{"role": "user", "content": "x" * 2**20}])
    name, attributes, _ = traced(line, replied(), Usage(10), captures_content=True)
    assert name == "unknown"
    assert attributes["gen_ai.usage.input_tokens"] == 10
    assert "gen_ai.input.messages" not in attributes


@pytest.mark.parametrize(
    ("url", "operation"),
    [
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v2/embed", "embeddings"),
        ("/v1/rerank", "rerank"),
        ("/v1/audio/transcriptions", "transcriptions"),
    ],
)
def test_an_operation_has_its_name(url: str, operation: str) -> None:
    """It is the conventions' name, or the end of the URL."""
    line = {"url": url, "body": {"model": "m"}}
    assert traced(line, replied())[0] == f"{operation} m"
