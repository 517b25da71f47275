"""Tool call parsers of calls enclosed in marks: Gemma, Olmo 3, LFM2 and Apertus."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .json_text import Brackets, members
from .python_calls import parse_python_calls
from .text_stream import ParserCoroutine, TextStream, partial_mark_size
from .tool_calls import (
    INCOMPLETE,
    CallsCoroutine,
    MarkedCallParser,
    RawCall,
    parse_list,
    parse_object,
    read_quoted,
    stream_call,
)

_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[\w./:-]+)\s*(?P<arguments>\{.*\})\s*", re.DOTALL)
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


def _python_calls(marks: tuple[str, str]) -> MarkedCallParser:
    """Return the parser of Python, a list or lines, or of the JSON that a grammar enforces."""

    def parse(stream: TextStream) -> CallsCoroutine:
        calls = yield from parse_python_calls(stream)
        yield from stream.skip_space()
        yield from stream.accept_end(marks[1], least=1)
        return calls

    syntax = replace(
        LISTED_SYNTAX,
        prefix=marks[0] + LISTED_SYNTAX.prefix,
        suffix=LISTED_SYNTAX.suffix + marks[1],
    )
    return MarkedCallParser(marks[:1], parse, syntax, marks[1:])


def _apertus(stream: TextStream) -> CallsCoroutine:
    """Parse a list of objects with one member, the name and the arguments of a call."""
    yield from stream.skip_space()
    yield from stream.accept("[")
    calls = yield from parse_list(stream, _named_arguments)
    yield from stream.skip_space()
    yield from stream.accept(_APERTUS[1])
    return calls


def _named_arguments(stream: TextStream) -> CallsCoroutine:
    yield from stream.skip_space()
    name = (yield from read_quoted(stream)) if (yield from stream.accept("{")) else None
    yield from stream.skip_space()
    if name is None or not (yield from stream.accept(":")):
        return None
    yield from stream.skip_space()
    calls: list[RawCall] = []
    if (yield from stream_call(stream, name)) is None:
        arguments = yield from parse_object(stream)
        if arguments is None:
            return None
        calls.append(RawCall(name, arguments))
    yield from stream.skip_space()
    yield from stream.accept("}")
    return calls


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """Marks of a call such as `call:f{key:value}` in Gemma's form, and around its strings."""

    opens: str
    closes: str
    quote: str

    def parse_calls(self, stream: TextStream) -> CallsCoroutine:
        """Parse a call; stream its arguments if it calls a tool."""
        start = stream.at
        yield from stream.skip_space()
        name = (yield from stream.read_name()) if (yield from stream.accept("call:")) else ""
        yield from stream.skip_space()
        if name not in stream.tools or (yield from stream.peek(1)) != "{":
            stream.at = start
            return (yield from _enclosed(stream, (self.opens, self.closes), self._calls))
        if not stream.is_constrained:  # to JSON
            stream.emit_call(name, "")
            yield from self._stream_object(stream)
        else:
            yield from stream_call(stream, name)
        yield from stream.skip_space()
        yield from stream.accept(self.closes)
        return []

    def _stream_object(self, stream: TextStream) -> ParserCoroutine:
        """Emit an object as JSON arguments; the strings as they stream."""
        written: list[str] = []

        def write(text: str) -> None:
            written.append(text)
            stream.emit_arguments(text)

        marks = (self.quote, self.opens, self.closes)
        brackets = Brackets()
        mark: str | None = self.quote
        while mark == self.quote:
            stream.discard()
            text, mark = yield from stream.read_until(marks)
            end = brackets.find_end(text)
            if end is not None:
                stream.at, text, mark = end, text[:end], None
            elif mark is None:
                text = text[: len(text) - partial_mark_size(marks, text, 0)]
            if mark != self.quote:
                text = text.rstrip()
            is_whole = mark != self.quote and not written
            write(self._json_of(text) if is_whole else _quoted_keys(text))
            if mark == self.quote:
                stream.discard()
                write('"')
                mark = yield from stream.forward_until(
                    (self.quote,), lambda part: write(json.dumps(part, ensure_ascii=False)[1:-1])
                )
                write('"' if mark else "")
        stream.discard()
        if mark is not None:
            stream.push_back(mark)
        try:
            members("".join(written))
        except ValueError:
            stream.warn(INCOMPLETE)

    def _calls(self, text: str) -> list[RawCall]:
        """Return the call of a text such as `call:f{key:<|"|>value<|"|>,size:5}`."""
        match = _GEMMA_CALL.fullmatch(text)
        if match is None:
            raise ValueError("not a call")
        arguments = self._json_of(match["arguments"])
        members(arguments)
        return [RawCall(match["name"], arguments)]

    def _json_of(self, text: str) -> str:
        """Return an object as JSON; in Gemma's own form strings have marks, and keys no quotes."""
        with suppress(ValueError):
            members(text)
            return text
        parts = text.split(self.quote)
        parts[::2] = [_quoted_keys(part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
        return "".join(parts)


def _quoted_keys(text: str) -> str:
    return _BARE_KEY.sub(r'\1"\2": ', text)


def _gemma_parser(marks: GemmaMarks) -> MarkedCallParser:
    return MarkedCallParser(
        (marks.opens,),
        marks.parse_calls,
        CallSyntax(head=f"{marks.opens}call:{NAME}", tail=marks.closes),
        (marks.closes, marks.quote),
    )


_APERTUS = ("<|tools_prefix|>", "<|tools_suffix|>")
GEMMA = _gemma_parser(GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = _gemma_parser(
    GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
)
OLMO = _python_calls(("<function_calls>", "</function_calls>"))
LFM = _python_calls(("<|tool_call_start|>", "<|tool_call_end|>"))
APERTUS = MarkedCallParser(
    _APERTUS[:1],
    _apertus,
    CallSyntax(
        prefix=f"{_APERTUS[0]}[",
        head=f'{{"{NAME}": ',
        tail="}",
        between=", ",
        suffix=f"]{_APERTUS[1]}",
    ),
    _APERTUS[1:],
)
