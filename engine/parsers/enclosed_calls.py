"""Tool call parsers of calls that are no JSON between two marks: Gemma 4 and Olmo 3."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial

from .bare_calls import parse_python_calls
from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .json_text import members
from .text_stream import TextStream, partial_mark_size
from .tool_calls import CallsCoroutine, MarkedCallParser, RawCall

_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[\w./:-]+)\s*(?P<arguments>\{.*\})\s*", re.DOTALL)
_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\]:,"]+)\s*:\s*')


def _enclosed(
    stream: TextStream, marks: tuple[str, str], parse: Callable[[str], Sequence[RawCall]]
) -> CallsCoroutine:
    """Parse the text between two marks; another opening one ends it, too, as does the end."""
    text, mark = yield from stream.read_until(marks)
    if mark is None:
        text = text[: len(text) - partial_mark_size(marks[1:], text, 0)]
    elif mark != marks[1]:
        return None
    try:
        return parse(text) or None
    except ValueError:
        return None


def _gemma_calls(text: str) -> list[RawCall]:
    """Return the call of a text such as `call:f{key:<|"|>value<|"|>,size:5}`."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise ValueError("it calls nothing")
    arguments = match["arguments"]
    try:
        members(arguments)
    except ValueError:
        arguments = _json_of(arguments)
        members(arguments)
    return [RawCall(match["name"], arguments)]


def _json_of(text: str) -> str:
    """Return an object of Gemma's as JSON: its strings have marks, and its keys are bare."""
    parts = text.split(_QUOTE)
    parts[::2] = [_BARE_KEY.sub(r'\1"\2": ', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts)


_GEMMA, _OLMO = ("<|tool_call>", "<tool_call|>"), ("<function_calls>", "</function_calls>")
GEMMA = MarkedCallParser(
    _GEMMA[:1],
    partial(_enclosed, marks=_GEMMA, parse=_gemma_calls),
    CallSyntax(head=f"{_GEMMA[0]}call:{NAME}", tail=_GEMMA[1]),
    (_GEMMA[1], _QUOTE),
)
OLMO = MarkedCallParser(
    _OLMO[:1],
    partial(_enclosed, marks=_OLMO, parse=lambda text: parse_python_calls(text.strip())),
    CallSyntax(
        prefix=_OLMO[0] + LISTED_SYNTAX.prefix,
        head=LISTED_SYNTAX.head,
        tail=LISTED_SYNTAX.tail,
        between=LISTED_SYNTAX.between,
        suffix=LISTED_SYNTAX.suffix + _OLMO[1],
    ),
    _OLMO[1:],
)
