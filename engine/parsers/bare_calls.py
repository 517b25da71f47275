"""Parser of tool calls without marks, usually the whole answer: Llama 3, xLAM, or Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .json_text import pass_value
from .text_stream import ParserCoroutine, TextStream
from .tool_calls import (
    UNREAD,
    CallsCoroutine,
    RawCall,
    emit_calls,
    names_tools,
    parse_calls_of_json,
    parse_json_calls,
    read_quoted,
)

_MAX_DEPTH = 64
_PYTHON_PLAIN = re.compile(r"[^\[\](){}\"']*")
_PYTHON_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_STRINGS = {quote: re.compile(rf"(?:[^\\{quote}]|\\.)*", re.DOTALL) for quote in "'\""}
_NAMES = {"true": True, "false": False, "null": None}


class _CallsParser(Protocol):
    def __call__(self, stream: TextStream) -> CallsCoroutine:
        """Return the calls at this position, or None."""


class _CallDetector(Protocol):
    def __call__(self, stream: TextStream) -> Generator[None, None, bool]:
        """Return whether calls may be at this position; if not, move past the other text."""


@dataclass(frozen=True, slots=True)
class BareCallParser:
    """Tool call parser for calls without a mark, alone or in a text; a `ToolCallParser`.

    Calls start with one of `begins`, confirmed by `detect`. They name tools of the request and have
    arguments: everything else is content, in which `looks_like` finds text that deserves a warning.
    Any calls between a mark of `opens` and `closes` are parsed.
    """

    begins: tuple[str, ...]
    detect: _CallDetector
    looks_like: tuple[re.Pattern[str], ...]
    parse_calls: _CallsParser
    syntax: CallSyntax
    opens: tuple[str, ...] = ()
    closes: str | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts of the parser's special tokens."""
        return self.opens if self.closes is None else (*self.opens, self.closes)

    def syntax_for(self, template: str) -> CallSyntax:
        """Return the call syntax, which does not depend on the template."""
        del template
        return self.syntax

    def read(self, stream: TextStream) -> ParserCoroutine:
        """Parse an answer."""
        if stream.is_constrained:  # to calls at the beginning, or to none
            start = stream.at
            yield from stream.skip_space()
            if (yield from stream.peek(1)) == self.syntax.begins[0]:
                yield from self._unmarked(stream)
            else:
                stream.at = start
        marks = self.opens if stream.is_constrained else (*self.begins, *self.opens)
        while (mark := (yield from stream.forward_until(marks, stream.emit_content))) is not None:
            if mark in self.opens:
                yield from self._marked(stream, mark)
            else:
                stream.push_back(mark)
                yield from self._unmarked(stream)

    def _marked(self, stream: TextStream, mark: str) -> ParserCoroutine:
        stream.call_ends = self.marks
        calls = yield from self.parse_calls(stream)
        if calls is None:
            stream.warn(UNREAD)
            stream.at = 0  # `forward_until` has dropped the text before it
            stream.emit_content(mark)
        else:
            yield from self._emit(stream, calls)

    def _unmarked(self, stream: TextStream) -> ParserCoroutine:
        """Parse calls without a mark; other text becomes content as soon as that is clear."""
        start = stream.at
        # Text may quote a call with placeholders: only complete arguments make it certain.
        stream.call_ends = self.marks if stream.is_constrained else None
        may_call = yield from self.detect(stream)
        calls = (yield from self.parse_calls(stream)) if may_call else None
        if may_call and calls is None and stream.has_ended and stream.at == len(stream.text):
            stream.at = start  # a truncated call, unless it is in a list
            if stream.text.startswith("{", start):
                stream.call_ends = self.marks
                calls = yield from self.parse_calls(stream)
            if calls is None:
                stream.at = len(stream.text)
        if calls is not None and names_tools(stream, calls):
            yield from self._emit(stream, calls)
            return
        text = stream.text[start : stream.at]
        matches = [match for pattern in self.looks_like for match in pattern.finditer(text)]
        if any(match["name"] in stream.tools or match["arguments"] for match in matches):
            stream.warn(UNREAD)
        stream.emit_content(stream.text[: stream.at])
        stream.discard()

    def _emit(self, stream: TextStream, calls: Sequence[RawCall]) -> ParserCoroutine:
        if self.closes is not None:
            yield from stream.skip_space()
            yield from stream.accept(self.closes)
        emit_calls(stream, calls)


def _detect_objects(stream: TextStream) -> Generator[None, None, bool]:
    """Detect calls by the first member of an object, or of the first object in a list.

    Other JSON is emitted as content as it streams.
    """
    start = stream.at
    yield from stream.accept("[")
    yield from stream.skip_space()
    if (yield from stream.accept("{")):
        yield from stream.skip_space()
        key = yield from read_quoted(stream)
        yield from stream.skip_space()
        if key in _KEYS and (yield from stream.accept(":")):
            yield from stream.skip_space()
            name = (yield from read_quoted(stream)) if key == "name" else None
            if key != "name" or name in stream.tools or (yield from _has_arguments(stream)):
                stream.at = start
                return True
    stream.at = start
    yield from pass_value(stream, stream.emit_content)
    return False


def _has_arguments(stream: TextStream) -> Generator[None, None, bool]:
    """Return whether arguments are the next member."""
    yield from stream.skip_space()
    if not (yield from stream.accept(",")):
        return False
    yield from stream.skip_space()
    return (yield from stream.accept_any(('"parameters"', '"arguments"'))) is not None


def _detect_python(stream: TextStream) -> Generator[None, None, bool]:
    """Detect a list that begins with a call of a tool, a call by keyword, or an object."""
    start = stream.at
    if not (yield from stream.accept("[")):
        yield from pass_value(stream, stream.emit_content)
        return False
    yield from stream.skip_space()
    if (yield from stream.peek(1)) == "{":
        stream.at = start
        return (yield from _detect_objects(stream))
    name = yield from stream.read_name()
    is_call = bool(name) and (yield from stream.accept("("))
    if is_call and name not in stream.tools:
        yield from stream.skip_space()
        is_call = yield from stream.accept(")")
        if not is_call and (yield from stream.read_name()):
            yield from stream.skip_space()
            is_call = yield from stream.accept("=")
    stream.at = start if is_call else start + 1
    return is_call


def _detect_fenced(stream: TextStream) -> Generator[None, None, bool]:
    """Detect a list of calls, which may be in a code block."""
    start = stream.at
    if (yield from stream.accept_any(_FENCES)) is not None:
        yield from stream.skip_space()
        if (yield from stream.peek(1)) != "[":
            return False
    is_call = yield from _detect_objects(stream)
    if is_call:
        stream.at = start
    return is_call


def _fenced(stream: TextStream) -> CallsCoroutine:
    """Parse calls in JSON, with the marks of a code block around them."""
    fence = yield from stream.accept_any(_FENCES)
    calls = yield from parse_json_calls(stream)
    if fence is not None and calls is not None:
        yield from stream.skip_space()
        yield from stream.accept(_FENCES[1])
    return calls


def _objects(stream: TextStream) -> CallsCoroutine:
    """Parse objects separated by semicolons, as Llama 3 writes calls."""
    calls: list[RawCall] = []
    after = None
    while True:
        more = yield from parse_json_calls(stream)
        if more is None or (after is not None and not names_tools(stream, more)):
            if after is None:
                return None
            stream.rewind(after)
            return calls
        if stream.call_ends is not None and names_tools(stream, more):
            emit_calls(stream, more)
        else:
            stream.call_ends = None  # the next ones follow in order
            calls += more
        after = stream.position
        yield from stream.skip_space()
        if not (yield from stream.accept(";")):
            stream.rewind(after)
            return calls


def _python(stream: TextStream) -> CallsCoroutine:
    """Parse a Python list of calls by keyword; JSON's true, false and null are accepted."""
    yield from stream.skip_space()
    start = stream.at
    if stream.call_ends is not None and (yield from stream.peek(2)) == "[{":
        return (yield from parse_json_calls(stream))
    if (yield from stream.peek(1)) != "[" or not (yield from _skip_brackets(stream)):
        return None
    try:
        return parse_python_calls(stream.text[start : stream.at]) or None
    except ValueError:
        return None


def parse_python_calls(text: str) -> list[RawCall]:
    """Return the calls of a list or of lines in Python, or of JSON; ValueError for other texts."""
    try:
        nodes = [_expression_of(statement) for statement in ast.parse(text).body]
        if len(nodes) == 1 and isinstance(nodes[0], ast.List):
            nodes = nodes[0].elts
        return [_call_of(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return parse_calls_of_json(text)


def _expression_of(statement: ast.stmt) -> ast.expr:
    if not isinstance(statement, ast.Expr):
        raise ValueError("not an expression")  # noqa: TRY004 - of the text, not ours
    return statement.value


def _skip_brackets(stream: TextStream) -> Generator[None, None, bool]:
    """Move past brackets and their contents; False if they do not match."""
    closers: list[str] = []
    while True:
        match = _PYTHON_PLAIN.match(stream.text, stream.at)
        assert match is not None  # the empty string matches, too
        stream.at = match.end()
        char = yield from stream.peek(1)
        if not char:
            return False
        if _PYTHON_PLAIN.fullmatch(char):
            continue  # more text has arrived
        stream.at += 1
        if char in _PYTHON_CLOSERS and len(closers) < _MAX_DEPTH:
            closers.append(_PYTHON_CLOSERS[char])
        elif char in _STRINGS:
            if not (yield from _skip_quoted(stream, char)):
                return False
        elif not closers or char != closers.pop():
            return False
        if not closers:
            return True


def _skip_quoted(stream: TextStream, quote: str) -> Generator[None, None, bool]:
    while True:
        match = _STRINGS[quote].match(stream.text, stream.at)
        assert match is not None  # the empty string matches, too
        stream.at = match.end()
        char = yield from stream.peek(1)
        if char == quote:
            stream.at += 1
            return True
        # A backslash at the end waits for the character that it escapes.
        if not char or (char == "\\" and len((yield from stream.peek(2))) < 2):
            return False


def _call_of(node: ast.expr) -> RawCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by keyword")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a call by keyword")
        arguments[keyword.arg] = _value_of(keyword.value)
    return RawCall(_name_of(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a name")


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


_FENCES = ("```json", "```", "[TOOL_CALLS]")
_KEYS = frozenset(["name", "type", "function", "parameters", "arguments", "id"])
_JSON_CALL = re.compile(
    r'"(?:name|function)"\s*:\s*"(?P<name>[^"\\]{1,200})"'
    r'(?P<arguments>\s*,\s*"(?:parameters|arguments)"\s*:)?'
)
LLAMA_JSON = BareCallParser(
    ("{", "["),
    _detect_objects,
    (_JSON_CALL,),
    _objects,
    CallSyntax(head=f'{{"name": "{NAME}", "parameters": ', tail="}", between="; "),
    ("<|python_tag|>", "<|python_start|>"),
    "<|python_end|>",
)
# A grammar cannot check Python against a schema: forced calls are JSON.
PYTHONIC = BareCallParser(
    ("[", "{"),
    _detect_python,
    (_JSON_CALL, re.compile(r"\[\s*(?P<name>[A-Za-z_][\w.]*)\((?P<arguments>\s*\w+\s*=)?")),
    _python,
    LISTED_SYNTAX,
    ("<|python_start|>",),
    "<|python_end|>",
)
XLAM = BareCallParser(
    ("[", "```"),
    _detect_fenced,
    (_JSON_CALL,),
    _fenced,
    LISTED_SYNTAX,
    ("<tool_call>",),
    "</tool_call>",
)
LISTED_CALLS = BareCallParser(
    ("[",), _detect_objects, (_JSON_CALL,), parse_json_calls, LISTED_SYNTAX
)
"""For models with an unknown syntax: the constraint of forced calls."""
