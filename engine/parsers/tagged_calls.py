"""Tool call parser of calls between two tags, in JSON or with tagged arguments.

Hermes, Nemotron and Cohere use JSON; Qwen3-Coder, GLM, MiniMax and Seed-OSS use tags.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.constraints.schema_facts import (
    ANYTHING,
    Facts,
    SchemaFacts,
    type_of,
)

from .call_grammar import NAME, CallSyntax
from .json_text import loaded
from .text_stream import TextStream
from .tool_calls import CallsCoroutine, MarkedCallParser, RawCall, parse_json_calls

_PYTHON = {"True": "true", "False": "false", "None": "null"}


class ArgumentTypes:
    """The types of a function's arguments from its schema, including references and unions."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._facts = SchemaFacts(schema)
        self._members = self._facts.infer(schema).get("object", ANYTHING["object"])

    def json_of(self, text: str, key: str) -> str:
        """Return a text between tags as JSON: a string if that is allowed, else the text itself."""
        allowed = self._facts.infer(self._members.member(key)) or ANYTHING
        if _is_string(text, allowed):
            return _json(text)
        value = _PYTHON.get(text, text)
        try:
            kind = type_of(loaded(value))
        except ValueError:
            return _json(text)
        strings = allowed.get("string")
        if strings is None:
            return value.strip()
        # Quotes are part of the text, unless it must be one of certain values.
        is_other = kind != "string" or strings.values is not None
        return value.strip() if kind in allowed and is_other else _json(text)


def _is_string(text: str, allowed: Facts) -> bool:
    strings = allowed.get("string")
    is_typed = len(allowed) < len(ANYTHING)
    if strings is None or (text == "null" and "null" in allowed and is_typed):
        return False
    if strings.values is not None:
        return text in strings.values
    # A text with a pattern or a format may also match another allowed type.
    return strings.is_free


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_ARG_KEY, _ARG_VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")


@dataclass(frozen=True, slots=True)
class CallTags:
    """Tags of calls, of a function and its parameters in them.

    `name_end` ends the name in a tag. With `has_pairs` a call may be a bare name with tagged keys
    and values, as GLM writes it.
    """

    opens: str
    closes: str
    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    name_end: str = ">"
    has_pairs: bool = False

    def parse_calls(self, stream: TextStream) -> CallsCoroutine:
        """Parse calls up to their end tag, which may be missing; usually there is one call."""
        calls: list[RawCall] = []
        after = stream.at
        while True:
            yield from stream.skip_space()
            if calls and (yield from stream.accept(self.closes)):
                return calls
            if calls and (yield from stream.peek(1)) not in ("<", "{", "["):
                break
            more = yield from self._calls(stream, is_first=not calls)
            if more is None:
                break
            calls += more
            after = stream.at
        stream.at = after
        return calls or None

    def _calls(
        self, stream: TextStream, *, is_first: bool
    ) -> Generator[None, None, list[RawCall] | None]:
        if (yield from stream.accept(self.function)):
            call = yield from self._function(stream)
        elif (yield from stream.peek(1)) in ("{", "["):
            return (yield from parse_json_calls(stream))
        else:
            call = (yield from self._pairs(stream)) if is_first and self.has_pairs else None
        return None if call is None else [call]

    def _function(self, stream: TextStream) -> Generator[None, None, RawCall | None]:
        """Parse the rest of a function's tag: the name, and the arguments as a JSON text.

        A value is a string unless the function's schema allows another type that matches.
        """
        name = yield from stream.read_name()
        if not name or not (yield from stream.accept(self.name_end)):
            return None
        arguments: dict[str, str] = {}
        while True:
            yield from stream.skip_space()
            if not (yield from stream.accept(self.parameter)):
                break
            key = yield from stream.read_name()
            if not (yield from stream.accept(self.name_end)):
                return None
            value, mark = yield from self._value(stream)
            # Another call ends an unfinished one: otherwise many openings would take quadratic
            # time.
            if mark is None or mark in (self.opens, self.function):
                return None
            if mark != "</parameter>":  # omitted: another one begins
                stream.at -= len(mark)
            arguments[key] = _types_of(stream, name).json_of(
                value.removeprefix("\n").removesuffix("\n"), key
            )
        if not (yield from stream.accept_end(self.function_end)):
            # It may be omitted if the call ends or another begins.
            follows = yield from stream.peek(max(len(self.closes), len(self.function)))
            if not follows.startswith((self.closes, self.function)):
                return None
        return RawCall(name, _object(arguments))

    def _value(self, stream: TextStream) -> Generator[None, None, tuple[str, str | None]]:
        """Read a value and the mark after it; a function's tag before the value's end is text."""
        marks = (self.opens, self.parameter, "</parameter>", self.function_end, self.closes)
        value, mark = yield from stream.read_until((self.function, *marks))
        if mark == self.function:
            here = stream.at
            more, ending = yield from stream.read_until(marks)
            if ending == "</parameter>":
                return f"{value}{mark}{more}", ending
            stream.at = here
        return value, mark

    def _pairs(self, stream: TextStream) -> Generator[None, None, RawCall | None]:
        """Parse a bare name with tagged keys and values."""
        name = yield from stream.read_name()
        arguments: dict[str, str] = {}
        while True:
            yield from stream.skip_space()
            if not (yield from stream.accept(_ARG_KEY[0])):
                break
            key, mark = yield from stream.read_until(_ARG_KEY[1:])
            yield from stream.skip_space()
            if mark is None or not (yield from stream.accept(_ARG_VALUE[0])):
                return None
            value, mark = yield from stream.read_until(_ARG_VALUE[1:])
            if mark is None:
                return None
            arguments[key.strip()] = _types_of(stream, name).json_of(value, key.strip())
        # Without the end this would be any text that begins with a word.
        end = yield from stream.peek(len(self.closes))
        if not name or len(end) < 2 or not self.closes.startswith(end):
            return None
        if end != self.closes:  # truncated by the end of the text
            stream.at += len(end)
        return RawCall(name, _object(arguments))


def _types_of(stream: TextStream, name: str) -> ArgumentTypes:
    """Return a function's argument types, cached for all of its calls."""
    if name not in stream.types:
        stream.types[name] = ArgumentTypes(stream.tools.get(name, {}))
    types: ArgumentTypes = stream.types[name]
    return types


def _object(arguments: Mapping[str, str]) -> str:
    pairs = [f"{json.dumps(key, ensure_ascii=False)}: {arguments[key]}" for key in arguments]
    return f"{{{', '.join(pairs)}}}"


def _parser(tags: CallTags, unmarked: tuple[str, ...] = ()) -> MarkedCallParser:
    """Return the parser of calls that each have both tags."""
    syntax = CallSyntax(
        head=f'{tags.opens}\n{{"name": "{NAME}", "arguments": ',
        tail=f"}}\n{tags.closes}",
        between="\n",
    )
    return MarkedCallParser(
        (tags.opens,), tags.parse_calls, syntax, (tags.closes,), unmarked=unmarked
    )


def _list_parser(opens: str, closes: str, *, name: str = "name") -> MarkedCallParser:
    """Return the parser of a JSON list of calls between two tags."""
    arguments = "arguments" if name == "name" else "parameters"
    syntax = CallSyntax(
        prefix=f"{opens}[",
        head=f'{{"{name}": "{NAME}", "{arguments}": ',
        tail="}",
        between=", ",
        suffix=f"]{closes}",
    )
    return MarkedCallParser((opens,), CallTags(opens, closes).parse_calls, syntax, (closes,))


# Grammars constrain calls to JSON, which all of these accept: they cannot type tagged values.
HERMES = _parser(CallTags("<tool_call>", "</tool_call>", has_pairs=True), ("<function=",))
MINIMAX = _parser(
    CallTags(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        function='<invoke name="',
        function_end="</invoke>",
        parameter='<parameter name="',
        name_end='">',
    )
)
SEED = _parser(CallTags("<seed:tool_call>", "</seed:tool_call>"))
NEMOTRON = _list_parser("<TOOLCALL>", "</TOOLCALL>")
HUNYUAN = _list_parser("<tool_calls>", "</tool_calls>")
COHERE = _list_parser("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name")
