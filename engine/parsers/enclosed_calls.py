"""Tool call parsers of Gemma and Olmo 3, whose calls are enclosed in marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from .bare_calls import parse_python_calls
from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .json_text import Brackets, members
from .text_stream import ParserCoroutine, TextStream, partial_mark_size
from .tool_calls import (
    INCOMPLETE,
    CallsCoroutine,
    MarkedCallParser,
    RawCall,
    parse_json_calls,
    stream_call,
)

_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[\w./:-]+)\s*(?P<arguments>\{.*\})\s*", re.DOTALL)
_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\]:,"]+)\s*:\s*')


def _enclosed(
    stream: TextStream, marks: tuple[str, str], parse: Callable[[str], Sequence[RawCall]]
) -> CallsCoroutine:
    """Parse text up to the closing mark, another opening mark, or the end."""
    text, mark = yield from stream.read_until(marks)
    if mark is None:
        text = text[: len(text) - partial_mark_size(marks[1:], text, 0)]
    elif mark != marks[1]:
        return None
    try:
        return parse(text) or None
    except ValueError:
        return None


def _olmo(stream: TextStream) -> CallsCoroutine:
    """Parse lines of Python, or the list of JSON calls that a grammar enforces."""
    yield from stream.skip_space()
    if (yield from stream.peek(2)) != "[{":
        parse = partial(_enclosed, marks=_OLMO, parse=lambda text: parse_python_calls(text.strip()))
        return (yield from parse(stream))
    calls = yield from parse_json_calls(stream)
    yield from stream.skip_space()
    yield from stream.accept(_OLMO[1])
    return calls


def _gemma(stream: TextStream) -> CallsCoroutine:
    """Parse a call; stream its arguments if it calls a tool."""
    start = stream.at
    yield from stream.skip_space()
    name = (yield from stream.read_name()) if (yield from stream.accept("call:")) else ""
    yield from stream.skip_space()
    if name not in stream.tools or (yield from stream.peek(1)) != "{":
        stream.at = start
        return (yield from _enclosed(stream, marks=_GEMMA, parse=_gemma_calls))
    if not stream.is_constrained:  # to JSON
        stream.emit_call(name, "")
        yield from _stream_gemma_object(stream)
    else:
        yield from stream_call(stream, name)
    yield from stream.skip_space()
    yield from stream.accept(_GEMMA[1])
    return []


def _stream_gemma_object(stream: TextStream) -> ParserCoroutine:
    """Emit a Gemma object as JSON arguments; the strings as they stream."""
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        stream.emit_arguments(text)

    brackets = Brackets()
    mark: str | None = _QUOTE
    while mark == _QUOTE:
        stream.discard()
        text, mark = yield from stream.read_until((_QUOTE, *_GEMMA))
        end = brackets.find_end(text)
        if end is not None:
            stream.at, text, mark = end, text[:end], None
        elif mark is None:
            text = text[: len(text) - partial_mark_size((_QUOTE, *_GEMMA), text, 0)]
        if mark != _QUOTE:
            text = text.rstrip()
        write(_json_of(text) if mark != _QUOTE and not written else _quoted_keys(text))
        if mark == _QUOTE:
            stream.discard()
            write('"')
            mark = yield from stream.forward_until(
                (_QUOTE,), lambda part: write(json.dumps(part, ensure_ascii=False)[1:-1])
            )
            write('"' if mark else "")
    stream.discard()
    if mark is not None:
        stream.push_back(mark)
    try:
        members("".join(written))
    except ValueError:
        stream.warn(INCOMPLETE)


def _gemma_calls(text: str) -> list[RawCall]:
    """Return the call of a text such as `call:f{key:<|"|>value<|"|>,size:5}`."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise ValueError("not a call")
    arguments = _json_of(match["arguments"])
    members(arguments)
    return [RawCall(match["name"], arguments)]


def _json_of(text: str) -> str:
    """Return an object as JSON; in Gemma's own form strings have marks, and keys no quotes."""
    with suppress(ValueError):
        members(text)
        return text
    parts = text.split(_QUOTE)
    parts[::2] = [_quoted_keys(part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts)


def _quoted_keys(text: str) -> str:
    return _BARE_KEY.sub(r'\1"\2": ', text)


_GEMMA, _OLMO = ("<|tool_call>", "<tool_call|>"), ("<function_calls>", "</function_calls>")
GEMMA = MarkedCallParser(
    _GEMMA[:1],
    _gemma,
    CallSyntax(head=f"{_GEMMA[0]}call:{NAME}", tail=_GEMMA[1]),
    (_GEMMA[1], _QUOTE),
)
OLMO = MarkedCallParser(
    _OLMO[:1],
    _olmo,
    CallSyntax(
        prefix=_OLMO[0] + LISTED_SYNTAX.prefix,
        head=LISTED_SYNTAX.head,
        tail=LISTED_SYNTAX.tail,
        between=LISTED_SYNTAX.between,
        suffix=LISTED_SYNTAX.suffix + _OLMO[1],
    ),
    _OLMO[1:],
)
