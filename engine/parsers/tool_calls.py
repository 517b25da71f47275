"""Tool call parsers of JSON calls after a mark: Mistral, Granite, InternLM and Phi 4 Mini."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .json_text import (
    Brackets,
    items,
    members,
    pass_balanced,
    pass_value,
    skip_members,
    skip_value,
)
from .text_stream import ParserCoroutine, TextStream

_MAX_NAME_CHARS = 200
_NAMES, _ARGUMENTS = ("name", "function", "tool_name"), ("arguments", "parameters")
UNREAD = "A tool call could not be parsed; it stays in the content."
INCOMPLETE = "The arguments of a tool call are not a complete JSON object."


class RawCall(NamedTuple):
    """A parsed call; arguments and id are None if the model omitted them."""

    name: str
    arguments: str | None = None
    call_id: str | None = None


CallsCoroutine = Generator[None, None, Sequence[RawCall] | None]
"""Parses text after a mark; returns None, at some position in it, if it is not a call.

Calls that were emitted as they streamed are not in the result.
"""


class ToolCallParser(Protocol):
    """Tool call parser of one model's syntax. `marks` are the texts of its special tokens."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts of the special tokens."""

    def syntax_for(self, template: str) -> CallSyntax:
        """Return the call syntax of a model with this template."""

    def read(self, stream: TextStream) -> ParserCoroutine:
        """Parse an answer to its end, with its calls."""


class CallsParser(Protocol):
    """Parses the calls that follow a mark."""

    def __call__(self, stream: TextStream) -> CallsCoroutine:
        """Return the calls, or None."""


@dataclass(frozen=True, slots=True)
class MarkedCallParser:
    """Tool call parser of calls after one of the marks `opens`, anywhere; a `ToolCallParser`.

    Models whose template contains the `sign` use `syntax_with_sign`. A model may omit the mark
    before one of `unmarked` if it then calls one of its tools.
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
        """Parse an answer; calls that cannot be parsed stay content, including the mark."""
        marks = (*self.marks, *(() if stream.is_constrained else self.unmarked))
        while (mark := (yield from stream.forward_until(marks, stream.emit_content))) is not None:
            stream.call_ends = self.marks
            if mark in self.unmarked:
                stream.push_back(mark)
                stream.call_ends = None
            calls = None if mark in self.other_marks else (yield from self.parse_calls(stream))
            if calls is not None and (mark in self.opens or names_tools(stream, calls)):
                emit_calls(stream, calls)
                continue
            # `forward_until` has dropped the text before it.
            stream.at = len(mark) if mark in self.unmarked else 0
            name, _, _ = stream.text[stream.at : stream.at + _MAX_NAME_CHARS].partition(">")
            if mark in self.marks or calls is not None or name in stream.tools:
                stream.warn(UNREAD)
            stream.emit_content(mark)


def emit_calls(stream: TextStream, calls: Sequence[RawCall]) -> None:
    """Emit parsed calls, and discard their text."""
    for call in calls:
        stream.emit_call(call.name, call.arguments or "{}", call.call_id)
    stream.discard()


def names_tools(stream: TextStream, calls: Sequence[RawCall]) -> bool:
    """Return whether all calls name tools and have arguments; otherwise they may be text."""
    return all(call.name in stream.tools and call.arguments is not None for call in calls)


def parse_calls_of_json(text: str) -> list[RawCall]:
    """Return the calls of a JSON object or an array of them; raise ValueError for other texts."""
    if text.lstrip().startswith("["):
        return [call for item in items(text) for call in parse_calls_of_json(item)]
    call = members(text)
    if "function" in call and isinstance(call["function"][0], dict):
        return parse_calls_of_json(call["function"][1])
    name, _ = call.get("name") or call.get("function") or call.get("tool_name") or (None, "")
    if not isinstance(name, str) or not name:
        raise ValueError("the call has no name")
    member = call.get("arguments") or call.get("parameters")
    if member is None:
        return [RawCall(name)]
    value, arguments = member
    if isinstance(value, str):  # JSON encoded as a string
        members(value)
        return [RawCall(name, value)]
    if value is None:
        return [RawCall(name, "{}")]
    if not isinstance(value, dict):
        raise ValueError("arguments must be an object")  # noqa: TRY004 - a value of the text, not ours
    return [RawCall(name, arguments)]


def parse_json_calls(stream: TextStream) -> CallsCoroutine:
    """Parse one JSON value that is a call, or an array of calls; a `CallsCoroutine`."""
    yield from stream.skip_space()
    if stream.call_ends is None:
        return (yield from _whole_calls(stream))
    if not (yield from stream.accept("[")):
        return (yield from _streamed_call(stream))
    return (yield from parse_list(stream, _streamed_call))


def parse_list(stream: TextStream, parse_call: CallsParser) -> CallsCoroutine:
    """Parse the calls of a JSON list after its opening bracket, and emit each; `[]` if any."""
    after = None
    while (calls := (yield from parse_call(stream))) is not None:
        if stream.needs_tools and not names_tools(stream, calls):
            break
        emit_calls(stream, calls)
        yield from stream.skip_space()
        if (yield from stream.accept("]")) or not (yield from stream.accept(",")):
            return []
        yield from stream.skip_space()
        after = stream.position
    if after is None:
        return None
    stream.rewind(after)
    return []


def _streamed_call(stream: TextStream) -> Generator[None, None, list[RawCall] | None]:
    """Parse a JSON call; emit it from its arguments on if its name is written before them."""
    start = stream.at
    name = yield from _name_before_arguments(stream)
    has_end = None if name is None else (yield from stream_call(stream, name))
    if has_end is None:
        stream.at = start
        return (yield from _whole_calls(stream))
    after = stream.position
    if has_end and not (yield from skip_members(stream)) and stream.at < len(stream.text):
        stream.warn(UNREAD)
        stream.rewind(after)
    return []


def _name_before_arguments(stream: TextStream) -> Generator[None, None, str | None]:
    """Move to the arguments of a JSON call, and return its name; None if they are not next."""
    yield from stream.skip_space()
    name = None
    if not (yield from stream.accept("{")):
        return None
    while True:
        yield from stream.skip_space()
        key = yield from read_quoted(stream)
        yield from stream.skip_space()
        if key is None or not (yield from stream.accept(":")):
            return None
        yield from stream.skip_space()
        if key in _ARGUMENTS:
            return name
        if key in _NAMES and name is None:
            name = yield from read_quoted(stream)
            if name is None:
                return None
        elif not (yield from skip_value(stream)):
            return None
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            return None


def read_quoted(stream: TextStream) -> Generator[None, None, str | None]:
    """Read a short string without escapes."""
    if not (yield from stream.accept('"')):
        return None
    name = yield from stream.read_name()
    return name if (yield from stream.accept('"')) else None


def stream_call(
    stream: TextStream, name: str, call_id: str | None = None
) -> Generator[None, None, bool | None]:
    """Emit a call whose arguments begin here, as they stream; return whether they end here.

    Return None without a call where it is not certain, or for an unknown name. Invalid arguments
    end with their last bracket, or at the next mark.
    """
    if stream.call_ends is None or name not in stream.tools:
        return None
    if (yield from stream.peek(1)) != "{":
        return None
    stream.emit_call(name, "", call_id)
    stream.discard()
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        stream.emit_arguments(text)

    if (yield from pass_value(stream, write)):
        return True
    stream.warn(INCOMPLETE)
    brackets = Brackets()
    brackets.find_end("".join(written))
    return (yield from pass_balanced(stream, brackets, stream.call_ends, stream.emit_arguments))


def _whole_calls(stream: TextStream) -> Generator[None, None, list[RawCall] | None]:
    start = stream.at
    if not (yield from skip_value(stream)):
        return None
    try:
        return parse_calls_of_json(stream.text[start : stream.at]) or None
    except ValueError:
        return None


def json_calls(*, opens: str = "", closes: str = "") -> CallsParser:
    """Return a parser of JSON calls between two texts that may be missing."""

    def parse(stream: TextStream) -> CallsCoroutine:
        yield from stream.skip_space()
        yield from stream.accept(opens)
        calls = yield from parse_json_calls(stream)
        if calls is not None and closes:
            yield from stream.skip_space()
            yield from stream.accept(closes)
        return calls

    return parse


def _phi(stream: TextStream) -> CallsCoroutine:
    """Parse a list, whose opening bracket may be part of the mark."""
    yield from stream.skip_space()
    yield from stream.accept("[")
    yield from stream.skip_space()
    calls = yield from parse_list(stream, _streamed_call)
    yield from stream.skip_space()
    yield from stream.accept(_PHI[1])
    return calls


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
    if (yield from stream_call(stream, name, call_id)) is not None:
        return []
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


_INTERNLM, _PHI = ("<|plugin|>", "<|action_end|>"), ("<|tool_call|>", "<|/tool_call|>")
GRANITE = MarkedCallParser(
    ("<|tool_call|>",),
    parse_json_calls,
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
INTERNLM = MarkedCallParser(
    ("<|action_start|>",),
    json_calls(opens=_INTERNLM[0], closes=_INTERNLM[1]),
    CallSyntax(
        head=f'<|action_start|>{_INTERNLM[0]}\n{{"name": "{NAME}", "parameters": ',
        tail=f"}}{_INTERNLM[1]}",
    ),
    _INTERNLM,
)
PHI = MarkedCallParser(
    ("functools[", _PHI[0]),
    _phi,
    replace(LISTED_SYNTAX, prefix=f"functools{LISTED_SYNTAX.prefix}"),
    _PHI[1:],
)
