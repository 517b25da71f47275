"""Tool call parsers of calls behind a mark; those of mistral and granite."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .json_text import items, members, skip_value
from .text_stream import ParserCoroutine, TextStream

_MAX_NAME_CHARS = 200
UNREAD = "A call of a tool could not be read; it is left in the content."


class RawCall(NamedTuple):
    """A parsed call; without arguments, or an id, where the model wrote none."""

    name: str
    arguments: str | None = None
    call_id: str | None = None


CallsCoroutine = Generator[None, None, Sequence[RawCall] | None]
"""Parses text behind a mark; None, somewhere in it, where that is no call."""


class ToolCallParser(Protocol):
    """Tool call parser of one model's syntax. `marks` are the texts of its special tokens."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return them."""

    def syntax_for(self, template: str) -> CallSyntax:
        """Return the call syntax of a model with this template."""

    def read(self, stream: TextStream) -> ParserCoroutine:
        """Parse an answer to its end, with its calls."""


class CallsParser(Protocol):
    """Parses the calls that follow a mark."""

    def __call__(self, stream: TextStream) -> CallsCoroutine:
        """Return them, or None."""


@dataclass(frozen=True, slots=True)
class MarkedCallParser:
    """Tool call parser of calls behind one of the marks `opens`, anywhere; a `ToolCallParser`.

    Models whose template has the `sign` use `syntax_with_sign`. A model may leave the mark out
    before one of `unmarked`, and then calls one of its tools.
    """

    opens: tuple[str, ...]
    parse_calls: CallsParser
    syntax: CallSyntax
    other_marks: tuple[str, ...] = ()
    sign: str = ""
    syntax_with_sign: CallSyntax | None = None
    unmarked: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts of the parser's special tokens."""
        return self.opens + self.other_marks

    def syntax_for(self, template: str) -> CallSyntax:
        """Return the call syntax of a model with this template."""
        if self.syntax_with_sign is not None and self.sign in template:
            return self.syntax_with_sign
        return self.syntax

    def read(self, stream: TextStream) -> ParserCoroutine:
        """Parse an answer; calls that cannot be parsed stay content, mark and all."""
        marks = (*self.marks, *(() if stream.is_constrained else self.unmarked))
        while (mark := (yield from stream.forward_until(marks, stream.emit_content))) is not None:
            if mark in self.unmarked:
                stream.push_back(mark)
            said = None if mark in self.other_marks else (yield from self.parse_calls(stream))
            if said is not None and (mark in self.opens or names_tools(stream, said)):
                emit_calls(stream, said)
                continue
            # `forward_until` has dropped all before.
            stream.at = len(mark) if mark in self.unmarked else 0
            name, _, _ = stream.text[stream.at : stream.at + _MAX_NAME_CHARS].partition(">")
            if mark in self.marks or said is not None or name in stream.tools:
                stream.warn(UNREAD)
            stream.emit_content(mark)


def emit_calls(stream: TextStream, said: Sequence[RawCall]) -> None:
    """Emit parsed calls, and discard their text."""
    for call in said:
        stream.emit_call(call.name, call.arguments or "{}", call.call_id)
    stream.discard()


def names_tools(stream: TextStream, said: Sequence[RawCall]) -> bool:
    """Say whether calls name tools alone, and have arguments: without a mark they may be text."""
    return all(call.name in stream.tools and call.arguments is not None for call in said)


def parse_calls_of_json(text: str) -> list[RawCall]:
    """Return the calls of a JSON object, or of an array of them; ValueError for other texts."""
    if text.lstrip().startswith("["):
        return [call for item in items(text) for call in parse_calls_of_json(item)]
    said = members(text)
    if "function" in said and isinstance(said["function"][0], dict):
        return parse_calls_of_json(said["function"][1])
    name, _ = said.get("name") or said.get("function") or said.get("tool_name") or (None, "")
    if not isinstance(name, str) or not name:
        raise ValueError("it names nothing to call")
    given = said.get("arguments") or said.get("parameters")
    if given is None:
        return [RawCall(name)]
    value, arguments = given
    if isinstance(value, str):  # a text of JSON inside JSON
        members(value)
        return [RawCall(name, value)]
    if value is None:
        return [RawCall(name, "{}")]
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")  # noqa: TRY004 - a value of the text, not ours
    return [RawCall(name, arguments)]


def parse_json_calls(stream: TextStream) -> Generator[None, None, list[RawCall] | None]:
    """Parse one JSON value that is a call, or an array of calls."""
    start = stream.at
    if not (yield from skip_value(stream)):
        return None
    try:
        return parse_calls_of_json(stream.text[start : stream.at]) or None
    except ValueError:
        return None


def _granite(stream: TextStream) -> CallsCoroutine:
    return (yield from parse_json_calls(stream))


def _mistral(stream: TextStream) -> CallsCoroutine:
    yield from stream.skip_space()
    if (yield from stream.peek(1)) in ("[", "{"):
        return (yield from parse_json_calls(stream))
    name = yield from stream.read_name()
    call_id = None
    if (yield from stream.accept("[CALL_ID]")):
        call_id = (yield from stream.read_name()) or None
    yield from stream.accept("[ARGS]")
    yield from stream.skip_space()
    arguments = yield from parse_object(stream)
    if not name or arguments is None:
        return None
    return [RawCall(name, arguments, call_id)]


def parse_object(stream: TextStream) -> Generator[None, None, str | None]:
    """Read the text of one JSON object."""
    start = stream.at
    if not (yield from skip_value(stream)):
        return None
    text = stream.text[start : stream.at]
    try:
        members(text)
    except ValueError:
        return None
    return text


GRANITE = MarkedCallParser(
    ("<|tool_call|>",),
    _granite,
    replace(LISTED_SYNTAX, prefix=f"<|tool_call|>{LISTED_SYNTAX.prefix}"),
)
MISTRAL = MarkedCallParser(
    ("[TOOL_CALLS]",),
    _mistral,
    replace(LISTED_SYNTAX, prefix=f"[TOOL_CALLS]{LISTED_SYNTAX.prefix}"),
    ("[ARGS]", "[CALL_ID]"),
    sign="[ARGS]",
    syntax_with_sign=CallSyntax(head=f"[TOOL_CALLS]{NAME}[ARGS]"),
)
