"""Runs one line of a file and returns its row, whatever happens."""

from __future__ import annotations

import asyncio
from functools import partial
from time import perf_counter
from typing import NamedTuple

from tidemill.protocol.bodies import error_body
from tidemill.protocol.contract import EngineError, Reply, Responder, Usage
from tidemill.protocol.errors import InternalError
from tidemill.protocol.in_thread import LONG_BYTES, in_thread_if_long

from .expected_tokens import NO_TOKENS, ExpectedTokens, expected_tokens
from .lines import PLACES_MARK, Line, LineError, RawLine, parse_line
from .rows import Dialect, RowError, print_malformed, print_reply


class LineResult(NamedTuple):
    """The printed row of one line, newline included; `usage` is None without a reply.

    `failure` is the message of an error row. `expected` has the tokens of a line with a body, if
    they were requested.
    """

    row: bytes
    is_success: bool
    usage: Usage | None = None
    failure: str | None = None
    expected: ExpectedTokens = NO_TOKENS
    is_reused: bool = False
    print_seconds: float = 0.0


async def run_line(
    raw: RawLine,
    responder: Responder,
    *,
    created: int,
    dialect: Dialect = "openai",
    max_row_bytes: int | None = None,
    with_expected: bool = False,
) -> LineResult:
    """Return the row of a line; every failure of the line becomes an error row.

    A row above `max_row_bytes` is replaced by an error row. It must run in its own task: cancelling
    that task does not fail the request, but any other cancellation does.

    Raises EngineError if the engine can no longer answer.
    """
    try:
        is_long = len(raw.data) > LONG_BYTES
        if is_long:
            line = await asyncio.to_thread(parse_line, raw, in_slices=True)
        else:
            line = parse_line(raw)
    except LineError as exc:
        return LineResult(print_malformed(raw.digest, exc), is_success=False, failure=exc.message)
    expected = expected_tokens(line.url, line.body, len(raw.data)) if with_expected else NO_TOKENS
    try:
        reply = await responder.respond(line.url, line.body, line.request_id, created)
        if reply.status_code != 200 and PLACES_MARK in raw.data:
            reply = await _with_own_names(reply, raw)
        began = perf_counter()
        if reply.is_long:
            row = await asyncio.to_thread(_print, line, reply, dialect)
        else:
            row = _print(line, reply, dialect)
        print_seconds = perf_counter() - began
        if max_row_bytes is not None:
            _check_length(row, max_row_bytes)
    except EngineError:
        raise
    except (Exception, asyncio.CancelledError) as exc:
        if isinstance(exc, asyncio.CancelledError) and is_being_cancelled():
            raise
        error = _failure_of(exc)
        row = print_reply(line, error.status_code, error_body(error), dialect=dialect)
        return LineResult(row, is_success=False, failure=error.message, expected=expected)
    if reply.status_code == 200:
        fields = row, True, reply.usage, None, expected, reply.is_reused, print_seconds
        return tuple.__new__(LineResult, fields)  # without the constructor's own Python code
    failure = reply.body["error"]["message"]
    return LineResult(row, is_success=False, usage=reply.usage, failure=failure, expected=expected)


async def _with_own_names(reply: Reply, raw: RawLine) -> Reply:
    """Return the error of a vendor's line with its names and places."""
    from .vendor_lines import own_error  # late: few lines are a vendor's

    error = await in_thread_if_long(partial(own_error, reply.body["error"]), raw.data)
    return reply._replace(body={**reply.body, "error": error})


def _print(line: Line, reply: Reply, dialect: Dialect) -> bytes:
    return print_reply(
        line,
        reply.status_code,
        reply.body,
        dialect=dialect,
        bare_message=reply.bare_message,
        is_long=reply.is_long,
    )


def _check_length(row: bytes, max_row_bytes: int) -> None:
    if len(row) > max_row_bytes:
        raise RowError(f"its row would have {len(row):,} bytes; the limit is {max_row_bytes:,}")


def is_being_cancelled() -> bool:
    """Return whether the current task is cancelled, instead of a future that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failure_of(exc: BaseException) -> InternalError:
    words = str(exc) if isinstance(exc, RowError) else f"{type(exc).__name__}: {exc}"
    # An exception may quote a lone surrogate, which a row cannot contain.
    words = words.encode("utf-8", "replace").decode()
    return InternalError(f"The engine failed on this request: {words}")
