"""JSON in a flow of text: where a value ends, and what the members of an object are, as written."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, NoReturn

from engine.answers.flow import Flow, Waiting

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = frozenset({"true", "false", "null"})
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_MAX_DEPTH = 256
_MAX_SCALAR_CHARS = 4_000

Finding = Generator[None, None, bool]


def skip_value(flow: Flow) -> Finding:
    """Move past one JSON value; False, somewhere in it, as soon as it is none.

    White space before it is passed over, too.
    """
    closers: list[str] = []  # of what is open now
    is_first = True
    while True:
        yield from flow.skip_space()
        char = yield from flow.peek(1)
        if is_first and closers and char == closers[-1]:
            flow.at += 1
            closers.pop()
        else:
            if closers and closers[-1] == "}" and not (yield from _skip_key(flow)):
                return False
            char = yield from flow.peek(1)
            if is_first := char in _CLOSERS and len(closers) < _MAX_DEPTH:
                flow.at += 1
                closers.append(_CLOSERS[char])
                continue
            if not (yield from _skip_scalar(flow, char)):
                return False
        if not (yield from _skip_ends(flow, closers)):
            return False
        if not closers:
            return True
        is_first = False


def pass_value(flow: Flow) -> Waiting:
    """Say one JSON value, or what there is of it, as it comes."""
    for _ in skip_value(flow):
        flow.say(flow.text[: flow.at])
        flow.drop()
        yield
    flow.say(flow.text[: flow.at])
    flow.drop()


def _skip_ends(flow: Flow, closers: list[str]) -> Finding:
    """Move past the comma after a value, and before it past the ends of what the value ends."""
    while closers:
        yield from flow.skip_space()
        char = yield from flow.peek(1)
        if char not in (",", closers[-1]):
            return False
        flow.at += 1
        if char == ",":
            break
        closers.pop()
    return True


def _skip_key(flow: Flow) -> Finding:
    """Move past a member's name, its colon and the white space around them."""
    if not (yield from _skip_string(flow)):
        return False
    yield from flow.skip_space()
    if not (yield from flow.takes(":")):
        return False
    yield from flow.skip_space()
    return True


def _skip_scalar(flow: Flow, char: str) -> Finding:
    if char == '"':
        return (yield from _skip_string(flow))
    while True:
        end = _end_of(_SCALAR, flow)
        if end < len(flow.text) or flow.has_ended or end - flow.at > _MAX_SCALAR_CHARS:
            break
        yield
    text = flow.text[flow.at : end]
    flow.at = end
    return text in _WORDS or _NUMBER.fullmatch(text) is not None


def _skip_string(flow: Flow) -> Finding:
    if not (yield from flow.takes('"')):
        return False
    while True:
        flow.at = _end_of(_PLAIN, flow)
        char = yield from flow.peek(1)
        if char == '"':
            flow.at += 1
            return True
        if char == "\\":
            escaped = (yield from flow.peek(2))[1:]
            size = 4 if escaped == "u" else 0
            digits = (yield from flow.peek(2 + size))[2:]
            is_escape = bool(escaped) and escaped in '"\\/bfnrtu'
            if not is_escape or len(digits) < size or not _HEX.issuperset(digits):
                return False
            flow.at += 2 + size
        elif char < " ":  # what none may hold as it is, or the end of the text
            return False


def _end_of(pattern: re.Pattern[str], flow: Flow) -> int:
    match = pattern.match(flow.text, flow.at)
    assert match is not None  # all of these patterns match nothing, too
    return match.end()


def loaded(text: str) -> Any:
    """Return what a JSON text means; ValueError for what is none, and for what none may hold."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def members(text: str) -> dict[str, tuple[Any, str]]:
    """Return the members of an object: the value of each, and how it is written.

    Raises ValueError where the text is not one object.
    """
    if not isinstance(loaded(text), dict):
        raise ValueError("it is no object")  # noqa: TRY004 - a value of the text, not of ours
    decoder, found = json.JSONDecoder(), {}
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = _after_space(text, text.index(":", at) + 1)
        value, end = decoder.raw_decode(text, start)
        found[name] = (value, text[start:end])
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def items(text: str) -> list[str]:
    """Return how each item of an array is written; ValueError where the text is not one array."""
    if not isinstance(loaded(text), list):
        raise ValueError("it is no array")  # noqa: TRY004 - a value of the text, not of ours
    decoder, found = json.JSONDecoder(), []
    at = _after_space(text, text.index("[") + 1)
    while text[at] != "]":
        _, end = decoder.raw_decode(text, at)
        found.append(text[at:end])
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


def _after_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
