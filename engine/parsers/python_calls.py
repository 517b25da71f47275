"""Tool calls in Python, a list or lines of calls by keyword, written as JSON while they stream."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Generator
from typing import Any

from .tagged_calls import CallArguments
from .text_stream import TextStream
from .tool_calls import (
    INCOMPLETE,
    CallsCoroutine,
    RawCall,
    emit_calls,
    names_tools,
    parse_json_calls,
)

_MAX_DEPTH = 64
_PLAIN = re.compile(r"[^,\[\](){}\"']*")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_TEXTS = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_QUOTED = {quote: re.compile(rf"(?:[^\\{quote}]|\\.)*", re.DOTALL) for quote in "'\""}
_NAMES = {"true": True, "false": False, "null": None}
_ESCAPES: dict[str, str] = dict(
    zip("\n\\'\"abfnrtv", ("", "\\", "'", '"', *"\a\b\f\n\r\t\v"), strict=True)
)
_CODE_SIZES = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9A-Fa-f]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_OCTAL = re.compile(r"[0-7]{1,3}")

_Write = Callable[[str], None]
_ScanCoroutine = Generator[None, None, bool]


def parse_python_calls(stream: TextStream) -> CallsCoroutine:
    """Parse calls in Python, or in JSON; emit them as they stream if they are certain.

    JSON's true, false and null are accepted in Python, and so are line breaks in strings.
    """
    yield from stream.skip_space()
    start = stream.at
    is_list = yield from stream.accept("[")
    yield from stream.skip_space()
    if (yield from stream.peek(1)) == "{":
        stream.at = start
        return (yield from parse_json_calls(stream))
    calls: list[RawCall] = []
    after = None
    while (more := (yield from _parse_call(stream))) is not None:
        if stream.call_ends is None:
            calls += more
        elif stream.needs_tools and not names_tools(stream, more):
            break
        else:
            emit_calls(stream, more)
        after = stream.position
        yield from stream.skip_space()
        if is_list and (yield from stream.accept("]")):
            return calls
        if is_list and not (yield from stream.accept(",")):
            break
        yield from stream.accept(";")
        yield from stream.skip_space()
        if is_list and (yield from stream.accept("]")):
            return calls
        after = stream.position
    if after is None or stream.call_ends is None:
        return None
    stream.rewind(after)
    return calls


def _parse_call(stream: TextStream) -> CallsCoroutine:
    """Parse a call by keyword; emit it from its first argument on if it is certain."""
    name = yield from stream.read_name()
    yield from stream.skip_space()
    if not name or not (yield from stream.accept("(")):
        return None
    arguments = CallArguments(stream, name)
    while True:
        yield from stream.skip_space()
        if (yield from stream.accept(")")):
            return arguments.end()
        if not (yield from _pass_argument(stream, arguments)):
            break
        yield from stream.skip_space()
        if not (yield from stream.accept(",")) and (yield from stream.peek(1)) != ")":
            break
    if not (arguments.streams and arguments.has_any):
        return None
    stream.warn(INCOMPLETE)
    stream.at = 0  # the text of written values was discarded
    ends = (")]", ")\n", *(stream.call_ends or ()))
    end = yield from stream.forward_until(ends, stream.emit_arguments)
    stream.push_back((end or "").removeprefix(")"))
    return []


def _pass_argument(stream: TextStream, arguments: CallArguments) -> _ScanCoroutine:
    """Add an argument; False, at some position in it, as soon as it is invalid."""
    key = yield from stream.read_name()
    yield from stream.skip_space()
    if not key or not (yield from stream.accept("=")):
        return False
    yield from stream.skip_space()
    held: str | None = ""  # brackets before the first value that is certain

    def write(text: str) -> None:
        nonlocal held
        if held is None:
            arguments.write(text)
        elif text in _CLOSERS:
            held += text
            return
        else:
            arguments.add(key, held + text)
            held = None
        if arguments.streams:
            stream.discard()

    return (yield from _pass_value(stream, write))


def _pass_value(stream: TextStream, write: _Write, depth: int = 0) -> _ScanCoroutine:
    """Pass a literal to `write` as JSON while it streams; False as soon as it is invalid."""
    char = yield from stream.peek(1)
    if char in _TEXTS:
        return (yield from _pass_string(stream, write))
    if char in ("[", "{") and depth < _MAX_DEPTH:
        return (yield from _pass_container(stream, write, depth + 1))
    text = yield from _read_expression(stream)
    try:
        value = _value_of(ast.parse(text.strip(), mode="eval").body)
        write(_json_of(value))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _pass_container(stream: TextStream, write: _Write, depth: int) -> _ScanCoroutine:
    """Pass a list or a dictionary, like `_pass_value`."""
    opens = yield from stream.peek(1)
    closes = _CLOSERS[opens]
    stream.at += 1
    write(opens)
    separator = ""
    while True:
        yield from stream.skip_space()
        if (yield from stream.accept(closes)):
            write(closes)
            return True
        if separator:
            write(separator)
        separator = ", "
        if opens == "{":
            if (yield from stream.peek(1)) not in _TEXTS:
                return False
            if not (yield from _pass_string(stream, write)):
                return False
            if not (yield from stream.accept(":")):
                return False
            write(": ")
            yield from stream.skip_space()
        if not (yield from _pass_value(stream, write, depth)):
            return False
        yield from stream.skip_space()
        if not (yield from stream.accept(",")) and (yield from stream.peek(1)) != closes:
            return False


def _pass_string(stream: TextStream, write: _Write) -> _ScanCoroutine:
    """Pass a string and those that follow it, which are one value, like `_pass_value`."""
    write('"')
    while (quote := (yield from stream.peek(1))) in _TEXTS:
        stream.at += 1
        if (yield from stream.peek(1)) == quote and (yield from stream.accept(quote * 2)):
            quote *= 3
        if not (yield from _pass_text(stream, quote, write)):
            return False
        yield from stream.skip_space()
    write('"')
    return True


def _pass_text(stream: TextStream, quote: str, write: _Write) -> _ScanCoroutine:
    """Pass the text of a string up to its closing quote, and move past that."""
    while True:
        start = stream.at
        stream.at = _end_of(_TEXTS[quote[0]], stream)
        if stream.at > start:
            write(_json_text(stream.text[start : stream.at]))
        char = yield from stream.peek(1)
        if char == "\\":
            escaped = yield from _read_escape(stream)
            if escaped is None:
                return False
            write(_json_text(escaped))
        elif not char or (yield from stream.accept(quote)):
            return bool(char)
        elif char == quote[0]:  # one of fewer than three
            stream.at += 1
            write(_json_text(char))


def _read_escape(stream: TextStream) -> Generator[None, None, str | None]:
    """Read the character of an escape, or a plain backslash; None at the end of the text."""
    kind = (yield from stream.peek(2))[1:]
    if not kind:
        return None
    if kind in _ESCAPES:
        stream.at += 2
        return _ESCAPES[kind]
    if kind in _CODE_SIZES:
        digits = (yield from stream.peek(2 + _CODE_SIZES[kind]))[2:]
        code = int(digits, 16) if _HEX.fullmatch(digits) else sys.maxunicode + 1
        if len(digits) == _CODE_SIZES[kind] and code <= sys.maxunicode:
            stream.at += 2 + len(digits)
            return chr(code)
    elif octal := _OCTAL.match((yield from stream.peek(4)), 1):
        stream.at += octal.end()
        return chr(int(octal[0], 8))
    stream.at += 1
    return "\\"


def _json_text(text: str) -> str:
    """Return the text of a JSON string."""
    return _json_of(text)[1:-1]


def _json_of(value: Any) -> str:
    """Return a value as JSON; surrogates are escaped, because they have no encoding."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _SURROGATE.search(text) is None else json.dumps(value, allow_nan=False)


def _read_expression(stream: TextStream) -> Generator[None, None, str]:
    """Read up to the comma or the bracket that ends an expression; "" if brackets do not match."""
    start = stream.at
    closers: list[str] = []
    while True:
        stream.at = _end_of(_PLAIN, stream)
        char = yield from stream.peek(1)
        if not char:
            return ""
        if _PLAIN.fullmatch(char):
            continue  # more text has arrived
        if not closers and (char == "," or char in _CLOSERS.values()):
            return stream.text[start : stream.at]
        stream.at += 1
        if char in _CLOSERS and len(closers) < _MAX_DEPTH:
            closers.append(_CLOSERS[char])
        elif char in _QUOTED:
            if not (yield from _skip_quoted(stream, char)):
                return ""
        elif char != "," and (not closers or char != closers.pop()):
            return ""


def _skip_quoted(stream: TextStream, quote: str) -> _ScanCoroutine:
    while True:
        stream.at = _end_of(_QUOTED[quote], stream)
        char = yield from stream.peek(1)
        if char == quote:
            stream.at += 1
            return True
        # A backslash at the end waits for the character that it escapes.
        if not char or (char == "\\" and len((yield from stream.peek(2))) < 2):
            return False


def _end_of(pattern: re.Pattern[str], stream: TextStream) -> int:
    match = pattern.match(stream.text, stream.at)
    assert match is not None  # all of these patterns also match the empty string
    return match.end()


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value_of(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            named = [None if key is None else _value_of(key) for key in keys]
            if not all(isinstance(key, str) for key in named):
                raise ValueError("member names must be strings")
            return dict(zip(named, map(_value_of, values), strict=True))
    value = ast.literal_eval(node)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError("not a JSON value")
