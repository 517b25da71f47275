"""Tool call parser of calls between two tags, in JSON or with tagged arguments.

Hermes, Nemotron and Cohere use JSON; Qwen3-Coder, GLM, LongCat, MiniMax and Seed-OSS use tags.
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
from .tool_calls import (
    INCOMPLETE,
    UNREAD,
    CallsCoroutine,
    MarkedCallParser,
    RawCall,
    emit_calls,
    parse_json_calls,
)

_REPEATED = "A tool call repeats a parameter; its first value is used."
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class ArgumentTypes:
    """The types of a function's arguments from its schema, including references and unions."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._facts = SchemaFacts(schema)
        self._members = self._facts.infer(schema).get("object", ANYTHING["object"])

    def json_of(self, text: str, key: str) -> str:
        """Return a text between tags as JSON: a string if that is allowed, else the text itself."""
        return json_text(text, self.allowed(key))

    def allowed(self, key: str) -> Facts:
        """Return the facts of an argument's values."""
        return self._facts.infer(self._members.member(key)) or ANYTHING

    def allowed_in(self, allowed: Facts, key: str | int) -> Facts:
        """Return the facts of a member of an object, or of an item of an array."""
        container = allowed.get("array" if isinstance(key, int) else "object")
        return ANYTHING if container is None else self._facts.infer(container.member(key))

    def is_text(self, key: str, begin: str) -> bool:
        """Return whether every text that begins like this is a string."""
        allowed = self.allowed(key)
        strings = allowed.get("string")
        return strings is not None and strings.values is None and _is_string(begin, allowed)


def json_text(text: str, allowed: Facts) -> str:
    """Return a text between tags as JSON: a string if that is allowed, else the text itself."""
    if _is_string(text, allowed):
        return json_string(text)
    value = _PYTHON.get(text, text)
    try:
        kind = type_of(loaded(value))
    except ValueError:
        return json_string(text)
    strings = allowed.get("string")
    if strings is None:
        return value.strip()
    # Quotes are part of the text, unless it must be one of certain values.
    is_other = kind != "string" or strings.values is not None
    return value.strip() if kind in allowed and is_other else json_string(text)


def _is_string(text: str, allowed: Facts) -> bool:
    strings = allowed.get("string")
    is_typed = len(allowed) < len(ANYTHING)
    if strings is None or (text == "null" and "null" in allowed and is_typed):
        return False
    if strings.values is not None:
        return text in strings.values
    # A text with a pattern or a format may also match another allowed type.
    return strings.is_free


def json_string(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


class CallArguments:
    """The arguments of one call as JSON; emitted as they are written if the call is certain."""

    __slots__ = ("_is_repeated", "_keys", "_name", "_stream", "_written", "streams")

    def __init__(self, stream: TextStream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._written: list[str] = []
        self._keys: set[str] = set()
        self._is_repeated = False
        self.streams = stream.call_ends is not None and name in stream.tools

    def types(self) -> ArgumentTypes:
        """Return the types of the function's arguments, cached for all of its calls."""
        types = self._stream.types
        if self._name not in types:
            types[self._name] = ArgumentTypes(self._stream.tools.get(self._name, {}))
        found: ArgumentTypes = types[self._name]
        return found

    @property
    def has_any(self) -> bool:
        """Return whether an argument was added."""
        return bool(self._keys)

    def add(self, key: str, value: str) -> None:
        """Add a member unless it is a repeat; `value` is a JSON text, or the beginning of one."""
        self._is_repeated = key in self._keys
        if self._is_repeated:
            self._stream.warn(_REPEATED)
            return
        text = f"{', ' if self._keys else '{'}{json_string(key)}: {value}"
        if self.streams and not self._keys:
            self._stream.emit_call(self._name, "")
        self._keys.add(key)
        self._write(text)

    def extend(self, text: str) -> None:
        """Add more of a string's text."""
        self.write(json_string(text)[1:-1])

    def end_string(self) -> None:
        """End a string."""
        self.write('"')

    def write(self, text: str) -> None:
        """Add more of a value's JSON text, unless the parameter is a repeat."""
        if not self._is_repeated:
            self._write(text)

    def end(self) -> list[RawCall]:
        """End the call; return it unless it was emitted."""
        if not (self.streams and self._keys):
            self._written.append("}" if self._keys else "{}")
            return [RawCall(self._name, "".join(self._written))]
        self._write("}")
        return []

    def abandon(self, *, is_whole: bool = False) -> list[RawCall] | None:
        """Return None for an invalid call, or nothing if it was emitted.

        `is_whole` means that the arguments end here, and text follows.
        """
        if not (self.streams and self._keys):
            return None
        self._stream.warn(UNREAD if is_whole else INCOMPLETE)
        return self.end() if is_whole else []

    def _write(self, text: str) -> None:
        if self.streams:
            self._stream.emit_arguments(text)
        else:
            self._written.append(text)


@dataclass(frozen=True, slots=True)
class CallTags:
    """Tags of calls, of a function and its parameters in them.

    `name_end` ends the name in a tag. With tags for `pairs` a call may be a bare name with tagged
    keys and values, as GLM writes it. `padding` is around each value.
    """

    opens: str
    closes: str
    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    name_end: str = ">"
    pairs: tuple[str, str] | None = None
    padding: str = "\n"

    def parse_calls(self, stream: TextStream) -> CallsCoroutine:
        """Parse calls up to their end tag, which may be missing; usually there is one call."""
        calls: list[RawCall] = []
        after = None
        while True:
            yield from stream.skip_space()
            if after is not None and (yield from stream.accept(self.closes)):
                return calls
            if after is not None and (yield from stream.peek(1)) not in (
                self.function[0],
                "{",
                "[",
            ):
                break
            more = yield from self._calls(stream, is_first=after is None)
            if more is None:
                break
            if stream.call_ends is None:
                calls += more
            else:
                emit_calls(stream, more)
            after = stream.position
        if after is None:
            return None
        stream.rewind(after)
        return calls

    def _calls(self, stream: TextStream, *, is_first: bool) -> CallsCoroutine:
        if (yield from stream.accept(self.function)):
            return (yield from self._function(stream))
        if (yield from stream.peek(1)) in ("{", "["):
            return (yield from parse_json_calls(stream))
        if is_first and self.pairs is not None:
            return (yield from self._pairs(stream, *self.pairs))
        return None

    def _function(self, stream: TextStream) -> CallsCoroutine:
        """Parse the rest of a function's tag: the name, and the arguments as a JSON text."""
        name = yield from stream.read_name()
        if not name or not (yield from stream.accept(self.name_end)):
            return None
        return (yield from self._parameters(stream, CallArguments(stream, name)))

    def _parameters(self, stream: TextStream, arguments: CallArguments) -> CallsCoroutine:
        """Parse the parameters of a call, and its end.

        A value is a string unless the function's schema allows another type that matches.
        """
        while True:
            yield from stream.skip_space()
            if not (yield from stream.accept_end(self.parameter)):
                break
            key = yield from stream.read_name()
            if not (yield from stream.accept(self.name_end)):
                return arguments.abandon()
            yield from stream.accept(self.padding)
            begin = (yield from stream.peek(4)) if arguments.streams else ""
            if begin and arguments.types().is_text(key, begin):
                mark = yield from self._stream_text(stream, arguments, key)
            else:
                value, mark = yield from self._value(stream)
                if mark in self._value_ends:
                    value = value.removesuffix(self.padding)
                    arguments.add(key, arguments.types().json_of(value, key))
            # Another call ends an unfinished one: otherwise many openings would take quadratic
            # time.
            if mark not in self._value_ends:
                return arguments.abandon()
        if not (yield from stream.accept_end(self.function_end)):
            # It may be omitted if the call or the text ends, or another begins.
            size = max(len(self.closes), len(self.function))
            follows = yield from stream.peek(size)
            is_cut = len(follows) < size and self.closes.startswith(follows)
            is_certain = stream.call_ends is not None or arguments.has_any
            if not follows.startswith((self.closes, self.function)) and not (is_cut and is_certain):
                return arguments.abandon(is_whole=len(follows) == size)
        return arguments.end()

    @property
    def _value_ends(self) -> tuple[str, ...]:
        """Return the marks that end a value; another parameter may follow without the first."""
        return ("</parameter>", self.parameter, self.function_end, self.closes)

    @property
    def _openings(self) -> tuple[str, str]:
        return self.function, self.opens

    def _text_ends(self, opening: str | None) -> tuple[str, ...]:
        """Return the marks that end a search for the end of a value with this opening in it."""
        return (self.opens if opening == self.function else self.function, *self._value_ends)

    def _value(self, stream: TextStream) -> Generator[None, None, tuple[str, str | None]]:
        """Read a value up to a mark, or past its own end, and return both.

        The opening mark, or a function's tag, before the value's end is text.
        """
        value, mark = yield from stream.read_until((*self._openings, *self._value_ends))
        if mark in self._openings:
            here = stream.at
            more, ending = yield from stream.read_until(self._text_ends(mark))
            if ending == "</parameter>":
                return f"{value}{mark}{more}", ending
            stream.at = here
        if mark not in (None, "</parameter>"):
            stream.at -= len(mark or "")
        return value, mark

    def _stream_text(
        self, stream: TextStream, arguments: CallArguments, key: str
    ) -> Generator[None, None, str | None]:
        """Write a string as it streams, and return the mark after it, like `_value`."""
        arguments.add(key, '"')
        ends = (*self._openings, *self._value_ends)
        ends += tuple(f"{self.padding}{mark}" for mark in self._value_ends if self.padding)
        mark = yield from stream.forward_until(ends, arguments.extend)
        if mark in self._openings:
            more, ending = yield from stream.read_until(self._text_ends(mark))
            if ending == "</parameter>":
                arguments.extend(mark + more.removesuffix(self.padding))
                mark = ending
            else:
                stream.at = 0
        mark = mark and mark.removeprefix("\n")
        if mark in self._value_ends:
            arguments.end_string()
        if mark not in (None, "</parameter>"):
            stream.push_back(mark or "")
        return mark

    def _pairs(self, stream: TextStream, key_tag: str, value_tag: str) -> CallsCoroutine:
        """Parse a bare name with tagged keys and values."""
        value_ends = (f"</{value_tag}>",)
        name = yield from stream.read_name()
        arguments = CallArguments(stream, name)
        while True:
            yield from stream.skip_space()
            if not (yield from stream.accept_end(f"<{key_tag}>")):
                break
            key, mark = yield from stream.read_until((f"</{key_tag}>",))
            yield from stream.skip_space()
            if mark is None or not (yield from stream.accept(f"<{value_tag}>")):
                return arguments.abandon()
            key = key.strip()
            begin = (yield from stream.peek(4)) if arguments.streams else ""
            if begin and arguments.types().is_text(key, begin):
                arguments.add(key, '"')
                mark = yield from stream.forward_until(value_ends, arguments.extend)
                if mark is not None:
                    arguments.end_string()
            else:
                value, mark = yield from stream.read_until(value_ends)
                if mark is not None:
                    arguments.add(key, arguments.types().json_of(value, key))
            if mark is None:
                return arguments.abandon()
        end = yield from stream.peek(len(self.closes))
        # Without the end, arguments or a tool this would be any text that is a word.
        is_certain = len(end) >= 2 or arguments.has_any or name in stream.tools
        if not (name and is_certain and self.closes.startswith(end)):
            return arguments.abandon(is_whole=len(end) == len(self.closes))
        if end != self.closes:  # truncated by the end of the text
            stream.at += len(end)
        return arguments.end()


def parser_of(tags: CallTags, unmarked: tuple[str, ...] = ()) -> MarkedCallParser:
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
HERMES = parser_of(
    CallTags("<tool_call>", "</tool_call>", pairs=("arg_key", "arg_value")), ("<function=",)
)
LONGCAT = parser_of(
    CallTags(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        pairs=("longcat_arg_key", "longcat_arg_value"),
    )
)
MINIMAX = parser_of(
    CallTags(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        function='<invoke name="',
        function_end="</invoke>",
        parameter='<parameter name="',
        name_end='">',
        padding="",
    )
)
SEED = parser_of(CallTags("<seed:tool_call>", "</seed:tool_call>"))
NEMOTRON = _list_parser("<TOOLCALL>", "</TOOLCALL>")
HUNYUAN = _list_parser("<tool_calls>", "</tool_calls>")
COHERE = _list_parser("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name")
