"""JSON in streamed text: the end of a value, and the members of an object as written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

from .text_stream import TextStream, find_first, partial_mark_size

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = frozenset({"true", "false", "null"})
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_STRUCTURE = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_MAX_DEPTH = 256
_MAX_SCALAR_CHARS = 4_000

ScanCoroutine = Generator[None, None, bool]


def skip_value(stream: TextStream) -> ScanCoroutine:
    """Move past one JSON value; False, at some position in it, as soon as it is invalid.

    Whitespace before it is skipped, too.
    """
    closers: list[str] = []  # of the open objects and arrays
    is_first = True
    while True:
        yield from stream.skip_space()
        char = yield from stream.peek(1)
        if is_first and closers and char == closers[-1]:
            stream.at += 1
            closers.pop()
        else:
            if closers and closers[-1] == "}" and not (yield from _skip_key(stream)):
                return False
            char = yield from stream.peek(1)
            if is_first := char in _CLOSERS and len(closers) < _MAX_DEPTH:
                stream.at += 1
                closers.append(_CLOSERS[char])
                continue
            if not (yield from _skip_scalar(stream, char)):
                return False
        if not (yield from _skip_ends(stream, closers)):
            return False
        if not closers:
            return True
        is_first = False


class Brackets:
    """Brackets in a text that may be invalid JSON; those in quotes do not count."""

    __slots__ = ("_closers", "_is_escape", "_is_quoted")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._is_quoted = False
        self._is_escape = False

    def find_end(self, text: str) -> int | None:
        """Return the end of the first value in the text, which continues the texts before it."""
        start = int(self._is_escape and bool(text))
        self._is_escape = self._is_escape and not text
        for match in _STRUCTURE.finditer(text, start):
            char = match[0]
            if char[0] == "\\":
                self._is_escape = len(char) == 1
            elif char == '"':
                self._is_quoted = not self._is_quoted
            elif self._is_quoted:
                continue
            elif char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
            elif char in self._closers[-_MAX_DEPTH:]:
                while self._closers.pop() != char:
                    pass
                if not self._closers:
                    return match.end()
        return None


def is_closed(text: str) -> bool:
    """Return whether a text that begins with a bracket has its closing one."""
    return Brackets().find_end(text) is not None


def pass_balanced(
    stream: TextStream, brackets: Brackets, ends: Sequence[str], sink: Callable[[str], None]
) -> ScanCoroutine:
    """Pass text to `sink` until the brackets close; False at one of `ends`, or without a close."""
    while True:
        place, mark = find_first(ends, stream.text, 0)
        if mark is None:
            place -= partial_mark_size(ends, stream.text, 0)
        end = brackets.find_end(stream.text[:place])
        stream.at = place if end is None else end
        sink(stream.text[: stream.at])
        if end is None and mark is None and stream.has_ended:
            stream.at = len(stream.text)
        stream.discard()
        if end is not None:
            return True
        if mark is not None or stream.has_ended:
            return False
        yield


def pass_value(stream: TextStream, sink: Callable[[str], None]) -> ScanCoroutine:
    """Pass one JSON value, or its valid part, to `sink` while it streams, like `skip_value`."""
    scan = skip_value(stream)
    while True:
        try:
            next(scan)
        except StopIteration as end:
            sink(stream.text[: stream.at])
            stream.discard()
            return bool(end.value)
        sink(stream.text[: stream.at])
        stream.discard()
        yield


def skip_members(stream: TextStream) -> ScanCoroutine:
    """Move past the end of an object whose last member was read, and past further members."""
    while True:
        yield from stream.skip_space()
        if (yield from stream.accept("}")):
            return True
        if not (yield from stream.accept(",")):
            return False
        yield from stream.skip_space()
        if not ((yield from _skip_key(stream)) and (yield from skip_value(stream))):
            return False


def _skip_ends(stream: TextStream, closers: list[str]) -> ScanCoroutine:
    """Move past the comma after a value, and past closers before it."""
    while closers:
        yield from stream.skip_space()
        char = yield from stream.peek(1)
        if char not in (",", closers[-1]):
            return False
        stream.at += 1
        if char == ",":
            break
        closers.pop()
    return True


def _skip_key(stream: TextStream) -> ScanCoroutine:
    """Move past a member's name, its colon and the whitespace around them."""
    if not (yield from _skip_string(stream)):
        return False
    yield from stream.skip_space()
    if not (yield from stream.accept(":")):
        return False
    yield from stream.skip_space()
    return True


def _skip_scalar(stream: TextStream, char: str) -> ScanCoroutine:
    if char == '"':
        return (yield from _skip_string(stream))
    while True:
        end = _end_of(_SCALAR, stream)
        if end < len(stream.text) or stream.has_ended or end - stream.at > _MAX_SCALAR_CHARS:
            break
        yield
    text = stream.text[stream.at : end]
    stream.at = end
    return text in _WORDS or _NUMBER.fullmatch(text) is not None


def _skip_string(stream: TextStream) -> ScanCoroutine:
    if not (yield from stream.accept('"')):
        return False
    while True:
        stream.at = _end_of(_PLAIN, stream)
        char = yield from stream.peek(1)
        if char == '"':
            stream.at += 1
            return True
        if char == "\\":
            escaped = (yield from stream.peek(2))[1:]
            size = 4 if escaped == "u" else 0
            digits = (yield from stream.peek(2 + size))[2:]
            is_escape = bool(escaped) and escaped in '"\\/bfnrtu'
            if not is_escape or len(digits) < size or not _HEX.issuperset(digits):
                return False
            stream.at += 2 + size
        elif char < " ":  # a control character, or the end of the text
            return False


def _end_of(pattern: re.Pattern[str], stream: TextStream) -> int:
    match = pattern.match(stream.text, stream.at)
    assert match is not None  # all of these patterns also match the empty string
    return match.end()


def loaded(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError for invalid JSON, NaN and infinities."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as exc:
        raise ValueError("the JSON is nested too deeply") from exc


def members(text: str) -> dict[str, tuple[Any, str]]:
    """Return the members of an object: the value of each, and its source text.

    Raises ValueError if the text is not a single object.
    """
    if not isinstance(loaded(text), dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a value of the text, not of ours
    decoder, result = json.JSONDecoder(), {}
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = _after_space(text, text.index(":", at) + 1)
        value, end = decoder.raw_decode(text, start)
        result[name] = (value, text[start:end])
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return result


def items(text: str) -> list[str]:
    """Return the source text of each item of an array; raise ValueError for other texts."""
    if not isinstance(loaded(text), list):
        raise ValueError("not a JSON array")  # noqa: TRY004 - a value of the text, not of ours
    decoder, sources = json.JSONDecoder(), []
    at = _after_space(text, text.index("[") + 1)
    while text[at] != "]":
        _, end = decoder.raw_decode(text, at)
        sources.append(text[at:end])
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return sources


def _after_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")
