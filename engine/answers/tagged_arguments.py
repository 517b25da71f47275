"""Calls whose arguments stand between tags, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping

from engine.answers.argument_types import ArgumentTypes
from engine.answers.flow import Flow

_END = "</tool_call>"
# Another call ends what was not: else a text of many beginnings would be read once for each.
_BEGINS = ("<tool_call>", "<function=")
_MARKS = ("<tool_call>", "<parameter=", "</parameter>", "</function>", _END)


def _types_of(flow: Flow, name: str) -> ArgumentTypes:
    """Return the types of a function's arguments, found once for all of its calls."""
    if name not in flow.types:
        flow.types[name] = ArgumentTypes(flow.tools.get(name, {}))
    found: ArgumentTypes = flow.types[name]
    return found


def _object(arguments: Mapping[str, str]) -> str:
    pairs = [f"{json.dumps(key, ensure_ascii=False)}: {arguments[key]}" for key in arguments]
    return f"{{{', '.join(pairs)}}}"


def read_function(flow: Flow) -> Generator[None, None, tuple[str, str] | None]:
    """Read what follows `<function=`: the name, and the arguments as a JSON text.

    A value is a text unless the function's schema says otherwise, and it reads as such.
    """
    name = yield from flow.word()
    if not name or not (yield from flow.takes(">")):
        return None
    arguments: dict[str, str] = {}
    while True:
        yield from flow.skip_space()
        if not (yield from flow.takes("<parameter=")):
            break
        key = yield from flow.word()
        if not (yield from flow.takes(">")):
            return None
        value, mark = yield from _value(flow)
        if mark is None or mark in _BEGINS:
            return None
        if mark != "</parameter>":  # left out: what follows begins anew
            flow.at -= len(mark)
        arguments[key] = _types_of(flow, name).json_of(
            value.removeprefix("\n").removesuffix("\n"), key
        )
    if not (yield from flow.takes("</function>")):
        # Left out, too, where the call ends or another begins.
        follows = yield from flow.peek(len(_END))
        if not follows.startswith((_END, "<function=")):
            return None
    return name, _object(arguments)


def _value(flow: Flow) -> Generator[None, None, tuple[str, str | None]]:
    """Read a value and the mark behind it; `<function=` is text where its own end follows."""
    value, mark = yield from flow.until(("<function=", *_MARKS))
    if mark == "<function=":
        here = flow.at
        more, ending = yield from flow.until(_MARKS)
        if ending == "</parameter>":
            return f"{value}{mark}{more}", ending
        flow.at = here
    return value, mark


def read_pairs(flow: Flow) -> Generator[None, None, tuple[str, str] | None]:
    """Read a bare name and pairs of key and value in tags; the same comes of it."""
    name = yield from flow.word()
    arguments: dict[str, str] = {}
    while True:
        yield from flow.skip_space()
        if not (yield from flow.takes("<arg_key>")):
            break
        key, mark = yield from flow.until(("</arg_key>",))
        yield from flow.skip_space()
        if mark is None or not (yield from flow.takes("<arg_value>")):
            return None
        value, mark = yield from flow.until(("</arg_value>",))
        if mark is None:
            return None
        arguments[key.strip()] = _types_of(flow, name).json_of(value, key.strip())
    # Without the end this would be any text that begins with a word.
    end = yield from flow.peek(len(_END))
    if not name or end != _END:
        return None
    return name, _object(arguments)
