"""Lines of other vendors' files as requests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tidemill.batch.file.formats import HEAD_BYTES, as_lines, detect_format
from tidemill.batch.file.lines import (
    MAX_LINE_BYTES,
    Line,
    LineError,
    RawLine,
    Vendor,
    parse_line,
)
from tidemill.batch.file.vendor_lines import request_line
from tidemill.protocol import json_printing, json_slices
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import check_request

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
CONTENTS = {"contents": [{"parts": [{"text": "Hi"}]}]}
URL = "/v1/chat/completions"
FIRST_LINES: dict[Vendor, dict[str, Any]] = {
    "anthropic": {"custom_id": "a", "params": {**CHAT, "max_tokens": 5}},
    "bedrock": {"recordId": "a", "modelInput": {**CHAT, "max_tokens": 5}},
    "gemini": {"key": "a", "request": {**CONTENTS, "generationConfig": {"maxOutputTokens": 5}}},
    "no_url": {"custom_id": "a", "body": {**CHAT, "max_tokens": 5}},
    "chats": {"id": "a", **CHAT, "max_tokens": 5},
}


def read(data: bytes, url: str | None = None, piece_bytes: int = 2**20) -> list[Line | LineError]:
    """Return the requests and errors of a file that is read in pieces of this size."""
    form = detect_format(data[:HEAD_BYTES])
    pieces = (data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes))
    form = form if url is None else type(form)(is_array=form.is_array, vendor=form.vendor, url=url)
    found: list[Line | LineError] = []
    for number, text in enumerate(b"".join(as_lines(form, pieces)).split(b"\n"), 1):
        if text:
            try:
                found.append(parse_line(RawLine(number, text)))
            except LineError as exc:
                found.append(exc)
    return found


@pytest.mark.parametrize("vendor", FIRST_LINES)
@pytest.mark.parametrize("packing", ["lines", "array", "gzip"])
@pytest.mark.parametrize("piece_bytes", [7, 2**20])
def test_each_vendor_is_detected_and_read(vendor: Vendor, packing: str, piece_bytes: int) -> None:
    """From lines, an array or gzip, in pieces of any size; blank lines are counted."""
    line = json.dumps(FIRST_LINES[vendor]).encode()
    data = (
        b"[%s,\n%s]" % (line, line)
        if packing == "array"
        else b"\xef\xbb\xbf%s\n\n%s" % (line, line)
    )
    if packing == "gzip":
        data = gzip.compress(data)
    assert detect_format(data).vendor == vendor
    first, last = read(data, piece_bytes=piece_bytes)
    assert isinstance(first, Line)
    assert isinstance(last, Line)
    assert (first.custom_id, first.url, first.body) == ("a", URL, {**CHAT, "max_tokens": 5})
    assert (first.number, last.number) == (1, 2 if packing == "array" else 3)


@pytest.mark.parametrize(
    "line",
    [
        {"custom_id": "a", "url": URL, "body": CHAT},
        {"custom_id": "a", "method": "POST", "url": URL, "body": {**CHAT, "params": {}}},
        {"custom_id": "a", "response": {"body": {}}, "error": None},
        {"text": "Hi", "label": 3},
        {"key": "a", "request": "Hi"},
        {"params": 3},
        [],
    ],
)
def test_other_lines_have_no_vendor(line: object) -> None:
    """Requests in OpenAI's form, rows and rows of tables are not translated."""
    assert detect_format(json.dumps(line).encode()).vendor is None


@pytest.mark.parametrize("vendor", FIRST_LINES)
def test_a_long_first_line_is_detected_by_its_beginning(vendor: Vendor) -> None:
    """Images make lines longer than the detected bytes."""
    text = "x" * HEAD_BYTES
    line = json.loads(json.dumps(FIRST_LINES[vendor]).replace("Hi", text))
    assert detect_format(json.dumps(line).encode()[:HEAD_BYTES]).vendor == vendor


def test_lines_that_are_not_of_the_vendor_say_why() -> None:
    """Each is one error with the line's ID; the others are requests."""
    good = {"recordId": "a", "modelInput": CHAT}
    config = {"inputText": "Hi", "textGenerationConfig": 3}
    lines: list[object] = [
        good,
        {"custom_id": "b", "url": URL, "body": CHAT},
        {"recordId": "c", "modelInput": [CHAT]},
        {"recordId": 4, "modelInput": CHAT},
        [good],
        {"modelInput": CHAT},
        {"recordId": "g", "modelInput": config},
        {"recordId": "h", "modelInput": CHAT, "url": URL, "body": CHAT},
    ]
    data = b"\n".join([*(json.dumps(line).encode() for line in lines), b"{", b'"x"'])
    found = read(data)
    errors = [
        (each.line, each.custom_id, each.message) for each in found if isinstance(each, LineError)
    ]
    assert errors[:3] == [
        (2, None, "`modelInput` is required and must be an object"),
        (3, "c", "`modelInput` must be an object, not an array"),
        (4, None, "`recordId` must be a string, not a number"),
    ]
    assert errors[4] == (7, "g", "`textGenerationConfig` must be an object, not a number")
    assert errors[5] == (8, "h", "`modelInput` and `body` are two requests: remove one")
    assert [line for line, _, _ in errors] == [2, 3, 4, 5, 7, 8, 9, 10]
    assert [each.custom_id for each in found if isinstance(each, Line)] == ["a", "6"]
    assert {each.code for each in found if isinstance(each, LineError)} == {"invalid_json_line"}


@pytest.mark.parametrize("name", ["params", "modelInput", "request"])
def test_the_request_of_a_vendor_has_no_url(name: str) -> None:
    """The one error says what to change, also without an ID."""
    [error] = read(json.dumps({"method": "POST", "url": URL, name: CHAT}).encode())
    assert isinstance(error, LineError)
    assert error.message == (
        f"the request is in `{name}`, but the line has a `url`: remove `url` and `method`, or "
        f"call `{name}` `body`"
    )


@pytest.mark.parametrize(
    ("body", "url", "found"),
    [
        (CHAT, None, URL),
        (CHAT, "/v1/embeddings", "/v1/embeddings"),
        (CHAT, "/v1/moderations", URL),
        ({"messages": None, "input": "Hi"}, URL, "/v1/embeddings"),
        ({"input": "Hi", "prompt": None}, "/v1/moderations", "/v1/moderations"),
        ({"input": "Hi", "prompt": {"id": "p"}}, "/v1/responses", "/v1/responses"),
        ({"prompt": {"id": "p"}}, "/v1/responses", "/v1/responses"),
        ({"prompt": "Hi"}, "/v1/responses", "/v1/completions"),
        ({"input": "Hi", "instructions": "Hi"}, "/v1/embeddings", "/v1/embeddings"),
        ({"prompt": "Hi"}, None, "/v1/completions"),
        ({"input": "Hi"}, None, "/v1/embeddings"),
        ({"input": "Hi"}, URL, "/v1/embeddings"),
        ({"input": "Hi"}, "/v1/responses", "/v1/responses"),
        ({"input": "Hi", "max_output_tokens": 3}, None, "/v1/responses"),
        ({"input": "Hi", "questions": []}, None, "/v1/decisions"),
        ({"query": "q", "documents": ["d"]}, None, "/v1/rerank"),
        ({"text_1": "q", "text_2": "d"}, None, "/v1/score"),
        ({"file_url": "data:"}, None, "/v1/audio/transcriptions"),
        ({"file_url": "data:"}, "/v1/audio/translations", "/v1/audio/translations"),
        ({"other": 1}, "/v1/completions", "/v1/completions"),
        ({"other": 1}, None, None),
    ],
)
def test_the_url_comes_from_the_body_or_the_endpoint(
    body: dict[str, Any], url: str | None, found: str | None
) -> None:
    """The endpoint decides where the body leaves a choice."""
    [line] = read(json.dumps({"custom_id": "a", "body": body}).encode(), url)
    if found is None:
        assert isinstance(line, LineError)
        assert line.message == "`url` is required and must be a string"
    else:
        assert isinstance(line, Line)
        assert (line.url, line.body) == (found, body)


def test_made_up_ids_of_chats_are_distinct() -> None:
    """A made-up ID differs from numbers that other rows have; a complete request stays."""
    request = {"custom_id": "r", "url": "/v1/embeddings", "body": {"input": "Hi"}}
    lines = [CHAT, {**CHAT, "id": 1}, {**CHAT, "id": True}, {**CHAT, "url": "x"}, request]
    found = read(b"\n".join(json.dumps(line).encode() for line in lines))
    assert [each.custom_id for each in found] == ["line-1", "1", "line-3", "line-4", "r"]
    assert isinstance(found[-1], Line)
    assert (found[-1].url, found[-1].body) == (request["url"], request["body"])


def test_a_line_with_its_own_url_keeps_it() -> None:
    """In a file whose first line has none."""
    lines = [{"custom_id": "a", "body": CHAT}, {"custom_id": "b", "url": "/x/score", "body": {}}]
    found = read(b"\n".join(json.dumps(line).encode() for line in lines))
    assert [each.url for each in found if isinstance(each, Line)] == [URL, "/x/score"]


@pytest.mark.parametrize(
    ("given", "url", "body"),
    [
        (
            {"anthropic_version": "v", "system": "s", **CHAT},
            URL,
            {"messages": [{"role": "system", "content": "s"}, *CHAT["messages"]]},
        ),
        ({**CHAT, "stop": ["x"]}, URL, {**CHAT, "stop": ["x"]}),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, URL, CHAT),
        ({"prompt": "Hi", "max_tokens": 3}, "/v1/completions", {"prompt": "Hi", "max_tokens": 3}),
        (
            {"inputText": "Hi", "dimensions": 8, "normalize": False},
            "/v1/embeddings",
            {"input": "Hi", "dimensions": 8, "normalize": False},
        ),
        (
            {
                "inputText": "Hi",
                "textGenerationConfig": {"maxTokenCount": 3, "topP": 1, "stopSequences": ["x"]},
            },
            "/v1/completions",
            {"prompt": "Hi", "max_tokens": 3, "top_p": 1, "stop": ["x"]},
        ),
        ({"prompt": "Hi", "max_gen_len": 3}, "/v1/completions", {"prompt": "Hi", "max_tokens": 3}),
    ],
)
def test_a_model_input_is_read_by_its_fields(
    given: dict[str, Any], url: str, body: dict[str, Any]
) -> None:
    """Anthropic's and Titan's are translated; the others have OpenAI's names."""
    [line] = read(json.dumps({"recordId": "a", "modelInput": given}).encode())
    assert isinstance(line, Line)
    assert (line.url, line.body) == (url, body)


def test_a_line_that_is_too_long_is_not_held() -> None:
    """It is one error, and the next line is a request."""
    good = json.dumps(FIRST_LINES["bedrock"]).encode()
    data = b"\n".join([good, b" " * (MAX_LINE_BYTES + 1), good])
    first, error, last = read(data)
    assert isinstance(error, LineError)
    assert error.message.startswith("too long: 37,748,737 bytes")
    assert isinstance(first, Line)
    assert isinstance(last, Line)


def test_a_large_line_is_translated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an event loop of another thread has short turns."""
    parsed, printed = list[int](), list[int]()

    def record(function: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
        def recorded(value: Any, **options: Any) -> Any:
            result = function(value, **options)
            sizes.append(len(value if isinstance(value, bytes) else result))
            return result

        return recorded

    monkeypatch.setattr(json_slices, "from_json", record(json_slices.from_json, parsed))
    monkeypatch.setattr(json_printing, "to_json", record(json_printing.to_json, printed))
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [*range(100_000)]}}
    messages = [{"role": "assistant", "content": [use]}]
    given = {"custom_id": "a", "params": {"messages": messages, "ids": [*range(100_000)]}}
    data = json.dumps(given).encode()
    line = json.loads(request_line("anthropic", RawLine(1, data)))
    [call] = line["body"]["messages"][0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == use["input"]
    assert max(parsed) < 2**19 < len(data)
    assert len(printed) > 15


TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
FULL: dict[Vendor, dict[str, Any]] = {
    "anthropic": {
        "custom_id": "a",
        "params": {
            "model": "m",
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": "y"},
                        {"type": "image", "source": {"type": "url", "url": "u"}},
                    ],
                },
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
        },
    },
    "gemini": {
        "key": "a",
        "request": {
            "systemInstruction": {"parts": [{"text": "s"}]},
            "contents": [
                {"role": "user", "parts": [{"inlineData": {"mimeType": "m", "data": "d"}}]},
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
                {"parts": [{"functionResponse": {"name": "f", "response": {}}}]},
            ],
            "generationConfig": {
                "topK": 3,
                "thinkingConfig": {"thinkingBudget": 3},
                "responseSchema": {
                    "type": "OBJECT",
                    "nullable": True,
                    "enum": ["a"],
                    "properties": {"a": {"anyOf": [{"type": "STRING"}]}},
                },
            },
            "tools": [{"functionDeclarations": [{"name": "f", "parameters": {}}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        },
    },
    "bedrock": {
        "recordId": "a",
        "modelInput": {
            "system": [{"text": "s"}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"image": {"format": "png", "source": {"bytes": "d"}}}],
                },
                {
                    "role": "assistant",
                    "content": [{"toolUse": {"toolUseId": "1", "name": "f", "input": {}}}],
                },
                {
                    "role": "user",
                    "content": [{"toolResult": {"toolUseId": "1", "content": [{"json": {}}]}}],
                },
            ],
            "inferenceConfig": {"maxTokens": 5, "stopSequences": ["x"]},
            "toolConfig": {
                "tools": [{"toolSpec": {"name": "f", "inputSchema": {"json": {}}}}],
                "toolChoice": {"any": {}},
            },
        },
    },
}
ODD = (None, True, 3, 10**400, -1.5, "", "é\0", [], [[]], {}, {"type": [], "text": {}})


def altered(value: Any) -> Iterator[Any]:
    """Yield copies of a value, each with another value in one place."""
    yield from ODD
    if isinstance(value, dict):
        for name, each in value.items():
            yield from ({**value, name: other} for other in altered(each))
            yield {key: value[key] for key in value if key != name}
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in altered(each))


@pytest.mark.parametrize("vendor", FULL)
def test_every_odd_value_gives_a_line(vendor: Vendor) -> None:
    """Each is a request, whose body is checked as any, or has one sentence."""
    num_requests = 0
    for line in altered(FULL[vendor]):
        raw = RawLine(1, request_line(vendor, RawLine(1, json.dumps(line).encode())))
        with suppress(LineError, RequestError):
            found = parse_line(raw)
            num_requests += 1
            check_request(found.url, found.body, None)
    assert num_requests > 400
