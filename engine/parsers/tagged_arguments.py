"""Parser of calls with arguments between tags, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping

from .argument_types import ArgumentTypes
from .text_stream import TextStream

_END = "</tool_call>"
# Another call ends an unfinished one: else many openings would make parsing quadratic.
_BEGINS = ("<tool_call>", "<function=")
_MARKS = ("<tool_call>", "<parameter=", "</parameter>", "</function>", _END)


def _types_of(stream: TextStream, name: str) -> ArgumentTypes:
    """Return a function's argument types, cached for all of its calls."""
    if name not in stream.types:
        stream.types[name] = ArgumentTypes(stream.tools.get(name, {}))
    found: ArgumentTypes = stream.types[name]
    return found


def _object(arguments: Mapping[str, str]) -> str:
    pairs = [f"{json.dumps(key, ensure_ascii=False)}: {arguments[key]}" for key in arguments]
    return f"{{{', '.join(pairs)}}}"


def read_function(stream: TextStream) -> Generator[None, None, tuple[str, str] | None]:
    """Parse the rest of `<function=`: the name, and the arguments as a JSON text.

    A value is a string unless the function's schema gives another type that it can be.
    """
    name = yield from stream.read_name()
    if not name or not (yield from stream.accept(">")):
        return None
    arguments: dict[str, str] = {}
    while True:
        yield from stream.skip_space()
        if not (yield from stream.accept("<parameter=")):
            break
        key = yield from stream.read_name()
        if not (yield from stream.accept(">")):
            return None
        value, mark = yield from _value(stream)
        if mark is None or mark in _BEGINS:
            return None
        if mark != "</parameter>":  # left out: another one begins
            stream.at -= len(mark)
        arguments[key] = _types_of(stream, name).json_of(
            value.removeprefix("\n").removesuffix("\n"), key
        )
    if not (yield from stream.accept("</function>")):
        # May be left out where the call ends or another begins.
        follows = yield from stream.peek(len(_END))
        if not follows.startswith((_END, "<function=")):
            return None
    return name, _object(arguments)


def _value(stream: TextStream) -> Generator[None, None, tuple[str, str | None]]:
    """Read a value and the mark behind it; `<function=` is text where its own end follows."""
    value, mark = yield from stream.read_until(("<function=", *_MARKS))
    if mark == "<function=":
        here = stream.at
        more, ending = yield from stream.read_until(_MARKS)
        if ending == "</parameter>":
            return f"{value}{mark}{more}", ending
        stream.at = here
    return value, mark


def read_pairs(stream: TextStream) -> Generator[None, None, tuple[str, str] | None]:
    """Parse a bare name with tagged keys and values, to the same result."""
    name = yield from stream.read_name()
    arguments: dict[str, str] = {}
    while True:
        yield from stream.skip_space()
        if not (yield from stream.accept("<arg_key>")):
            break
        key, mark = yield from stream.read_until(("</arg_key>",))
        yield from stream.skip_space()
        if mark is None or not (yield from stream.accept("<arg_value>")):
            return None
        value, mark = yield from stream.read_until(("</arg_value>",))
        if mark is None:
            return None
        arguments[key.strip()] = _types_of(stream, name).json_of(value, key.strip())
    # Without the end this would be any text that begins with a word.
    end = yield from stream.peek(len(_END))
    if not name or end != _END:
        return None
    return name, _object(arguments)
