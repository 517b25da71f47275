"""One line in, one row out, whatever the line contains and whatever fails."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file import run_line as module
from tidemill.batch.file.lines import Overlong, RawLine, Vendor
from tidemill.batch.file.run_line import LineResult, run_line
from tidemill.batch.file.vendor_lines import request_line
from tidemill.protocol.contract import EngineError, Reply, Usage

Act = Callable[[], Awaitable[Reply]]


class Scripted:
    """A responder that follows a script and records its requests."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.requests: list[tuple[Any, ...]] = []

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the script."""
        self.requests.append((url, body, request_id, created))
        return await self._act()


def gives(reply: Reply) -> Scripted:
    """Return a responder that always returns this reply."""

    async def act() -> Reply:
        return reply

    return Scripted(act)


def fails(failure: BaseException) -> Scripted:
    """Return a responder that always raises this exception."""

    async def act() -> Reply:
        raise failure

    return Scripted(act)


def raw(number: int = 3, **fields: object) -> RawLine:
    """Return a valid line, except for the given fields."""
    line = {"custom_id": "a", "url": "/v1/x", "body": {"x": 1}} | fields
    return RawLine(number, json.dumps(line).encode())


def shown(answered: LineResult) -> dict[str, Any]:
    """Return a result's row as JSON."""
    assert answered.row.endswith(b"\n")
    row: dict[str, Any] = json.loads(answered.row)
    return row


async def test_a_line_is_answered_by_the_responder() -> None:
    """The request has the line's own ID and the reply's creation time."""
    responder = gives(Reply(200, {"text": "hello"}, Usage(10, 4, 3)))
    answered = await run_line(raw(), responder, created=17)
    row = shown(answered)
    assert (answered.is_success, answered.usage) == (True, Usage(10, 4, 3))
    assert (row["custom_id"], row["response"]["body"]) == ("a", {"text": "hello"})
    request_id = row["response"]["request_id"]
    assert responder.requests == [("/v1/x", {"x": 1}, request_id, 17)]
    assert row["id"] == request_id.replace("req_", "batch_req_")


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
async def test_a_failed_reply_keeps_its_usage(dialect: Any) -> None:
    """The dialect decides where the error is."""
    error = {"error": {"message": "No.", "type": "t", "param": None, "code": "c"}}
    reply = Reply(404, error, Usage(1), bare_message=True)
    answered = await run_line(raw(), gives(reply), created=0, dialect=dialect)
    row = shown(answered)
    assert (answered.is_success, answered.usage) == (False, Usage(1))
    assert row["response"]["status_code"] == 404
    assert row["error"] == ("No." if dialect == "vllm" else None)


@pytest.mark.parametrize(
    "line",
    [
        RawLine(3, b"no json"),
        RawLine(3, b"[]"),
        RawLine(3, b"", Overlong(999, 100, "0" * 24)),
        raw(url=None),
        raw(body=7),
        raw(custom_id=5),
        raw(method=7),
    ],
)
async def test_a_malformed_line_gets_its_row_without_a_request(line: RawLine) -> None:
    """The row has the line's number and ID."""
    responder = gives(Reply(200, {}))
    answered = await run_line(line, responder, created=0)
    row = shown(answered)
    assert responder.requests == []
    assert (answered.is_success, answered.usage) == (False, None)
    assert (row["response"], row["error"]["code"]) == (None, "invalid_json_line")
    assert row["error"]["line"] == 3
    assert row["id"] == f"batch_req_{line.digest}"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (KeyError("k"), "KeyError: 'k'"),
        (MemoryError(), "MemoryError: "),
        (ValueError("half \ud800"), "ValueError: half ?"),
    ],
)
async def test_an_exception_of_one_request_is_its_500_row(failure: Exception, words: str) -> None:
    """The message is valid in any row."""
    row = shown(await run_line(raw(), fails(failure), created=0))
    assert row["response"]["status_code"] == 500
    error = row["response"]["body"]["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert error["message"] == f"The engine failed on this request: {words}"


async def test_a_reply_that_no_row_can_contain_is_a_500_row() -> None:
    """It contains the reason, without the name of an internal exception."""
    row = shown(await run_line(raw(), gives(Reply(200, {"x": "\ud800"})), created=0))
    message = row["response"]["body"]["error"]["message"]
    assert row["response"]["status_code"] == 500
    assert "cannot be printed as JSON" in message
    assert "RowError" not in message


async def test_a_row_above_the_limit_is_a_500_row() -> None:
    """It contains the length; a row at the limit is allowed."""
    responder = gives(Reply(200, {"x": "y" * 9_000}))
    whole = await run_line(raw(), responder, created=0)
    length = len(whole.row)
    at_limit = await run_line(raw(), responder, created=0, max_row_bytes=length)
    assert at_limit.row == whole.row
    cut = await run_line(raw(), responder, created=0, max_row_bytes=length - 1)
    assert (cut.is_success, shown(cut)["response"]["status_code"]) == (False, 500)
    assert f"{length:,} bytes; the limit is {length - 1:,}" in cut.row.decode()


async def test_the_end_of_the_engine_gives_no_row() -> None:
    """No more lines can be answered: the caller decides about the line."""
    with pytest.raises(EngineError, match="gone"):
        await run_line(raw(), fails(EngineError("gone")), created=0)


async def test_cancelling_the_lines_task_gives_no_row() -> None:
    """The caller no longer wants the result."""

    async def wait() -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(run_line(raw(), Scripted(wait), created=0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_from_inside_is_a_failed_row() -> None:
    """Only the request was cancelled, not its task."""

    async def be_cancelled() -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    for act in (Scripted(be_cancelled), fails(asyncio.CancelledError())):
        row = shown(await run_line(raw(), act, created=0))
        assert row["response"]["status_code"] == 500


@given(st.integers(1, 2**40), st.binary(max_size=40), st.integers(0, 2**40))
def test_any_bytes_get_one_reproducible_row(number: int, data: bytes, created: int) -> None:
    """A row depends only on the line's number and bytes and on `created`."""
    line = RawLine(number, data)
    answers = [
        asyncio.run(run_line(line, gives(Reply(200, {"created": created})), created=created))
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert answers[0].row.count(b"\n") == 1
    assert shown(answers[0])["id"] == f"batch_req_{line.digest}"


@pytest.mark.parametrize(("num_bytes", "is_long"), [(10, False), (200_000, True)])
async def test_long_lines_are_parsed_and_printed_in_a_thread(
    num_bytes: int, *, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of JSON would block the loop."""
    threads: list[int] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*arguments, **options)

        return call

    for function in (module.parse_line, module.print_reply):
        monkeypatch.setattr(module, function.__name__, noted(function))
    reply = Reply(200, {"x": 1}, is_long=is_long)
    answered = await run_line(raw(body={"x": "y" * num_bytes}), gives(reply), created=0)
    assert answered.is_success
    assert [thread != threading.get_ident() for thread in threads] == [is_long] * 2


_SYSTEM = [{"text": "Be brief."}]
_PARTS = [{"text": "Hi"}, {"video": {}}]


@pytest.mark.parametrize(
    ("vendor", "line", "place", "tokens"),
    [
        (
            "anthropic",
            {
                "custom_id": "a",
                "params": {
                    "system": "Be brief.",
                    "messages": [{"role": "user", "content": [{"type": "x"}] * 2}],
                },
            },
            "messages.0.content.1.type",
            "max_tokens",
        ),
        (
            "bedrock",
            {
                "recordId": "a",
                "modelInput": {
                    "system": _SYSTEM,
                    "messages": [{"role": "user", "content": _PARTS}],
                    "inferenceConfig": {},
                },
            },
            "messages.0.content.1.type",
            "inferenceConfig.maxTokens",
        ),
        (
            "gemini",
            {
                "key": "a",
                "request": {
                    "systemInstruction": {"parts": _SYSTEM},
                    "contents": [{"parts": _PARTS}],
                },
            },
            "contents.0.parts.1.type",
            "generationConfig.maxOutputTokens",
        ),
        (
            "no_url",
            {"custom_id": "a", "body": {"messages": []}},
            "messages.1.content.1.type",
            "max_tokens",
        ),
    ],
)
async def test_an_error_of_a_vendors_line_has_its_names_and_places(
    vendor: Vendor, line: dict[str, Any], place: str, tokens: str
) -> None:
    """A field of the user's that is named like ours changes nothing."""
    param = "messages.1.content.1.type"
    error = {"message": f"`{param}` is bad, `max_tokens` too.", "param": param, "code": "c"}
    responder = gives(Reply(400, {"error": error}))
    for own in ({"label": 5}, {"vendor_places": 5}):
        given = RawLine(1, json.dumps({**line, **own}).encode())
        request = RawLine(1, request_line(vendor, given))
        answered = await run_line(request, responder, created=0)
        message = f"`{place}` is bad, `{tokens}` too."
        expected = {"message": message, "param": place, "code": "c"}
        assert shown(answered)["response"]["body"]["error"] == expected
        assert answered.failure == message
