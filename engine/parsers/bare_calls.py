"""Parser of tool calls without marks, usually the whole answer: Llama 3, xLAM, or Python."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .json_text import pass_value
from .python_calls import parse_python_calls
from .text_stream import ParserCoroutine, TextStream
from .tool_calls import (
    UNREAD,
    CallsCoroutine,
    RawCall,
    emit_calls,
    names_tools,
    parse_json_calls,
    read_quoted,
)


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
    Calls at the start of an answer are certain from their arguments on if they begin with
    `certain`. Any calls between a mark of `opens` and `closes` are parsed.
    """

    begins: tuple[str, ...]
    detect: _CallDetector
    looks_like: tuple[re.Pattern[str], ...]
    parse_calls: _CallsParser
    syntax: CallSyntax
    opens: tuple[str, ...] = ()
    closes: str | None = None
    certain: str = "["

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
        stream.needs_tools = stream.is_constrained
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
        # A text may quote a call with placeholders: only complete arguments make it certain there.
        is_start = not stream.has_content and stream.text.startswith(self.certain, start)
        stream.call_ends = self.marks if is_start or stream.is_constrained else None
        stream.needs_tools = True
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
    certain="{",
)
# A grammar cannot check Python against a schema: forced calls are JSON.
PYTHONIC = BareCallParser(
    ("[", "{"),
    _detect_python,
    (_JSON_CALL, re.compile(r"\[\s*(?P<name>[A-Za-z_][\w.]*)\((?P<arguments>\s*\w+\s*=)?")),
    parse_python_calls,
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
