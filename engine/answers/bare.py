"""Calls of tools that are the whole answer: JSON as Llama 3 writes it, or Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

from engine.answers.calls import UNREAD, Calls, Said, following_json, json_calls
from engine.answers.flow import Flow, Waiting
from engine.answers.written import LISTED, NAME, Written

_MAX_DEPTH = 64
_PYTHON_PLAIN = re.compile(r"[^\[\](){}\"']*")
_PYTHON_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_STRINGS = {quote: re.compile(rf"(?:[^\\{quote}]|\\.)*", re.DOTALL) for quote in "'\""}
_NAMES = {"true": True, "false": False, "null": None}


class _Follows(Protocol):
    def __call__(self, flow: Flow) -> Calls:
        """Return the calls that stand here, or None."""


@dataclass(frozen=True, slots=True)
class BareCalls:
    """Calls that an answer consists of; a `CallForm`.

    The answer begins with `begins`, or a mark says that calls come: `opens`, with `closes` behind
    them. What only `looks_like` one is told to be unread.
    """

    begins: str
    looks_like: re.Pattern[str]
    follows: _Follows
    writes: Written
    opens: tuple[str, ...] = ()
    closes: str | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what special tokens are written like."""
        return self.opens if self.closes is None else (*self.opens, self.closes)

    def written(self, template: str) -> Written:
        """Return how they are written, whatever the template."""
        del template
        return self.writes

    def read(self, flow: Flow) -> Waiting:
        """Read an answer."""
        start = flow.at
        yield from flow.skip_space()
        if (yield from flow.peek(1)) == self.begins:
            yield from self._calls(flow, start, "")
        else:
            flow.at = start
        while (mark := (yield from flow.pass_on(self.opens, flow.say))) is not None:
            yield from self._calls(flow, flow.at, mark)

    def _calls(self, flow: Flow, start: int, mark: str) -> Waiting:
        said = yield from self.follows(flow)
        if said is None:
            if mark or self.looks_like.match(flow.text, start):
                flow.warn(UNREAD)
            flow.at = start
            flow.say(mark)
            return
        for call in said:
            flow.call(*call)
        if self.closes is not None:
            yield from flow.skip_space()
            yield from flow.takes(self.closes)
        flow.drop()


def _objects(flow: Flow) -> Calls:
    """Read objects with semicolons between them, as Llama 3 writes calls."""
    said: list[Said] = []
    while True:
        found = yield from following_json(flow)
        if found is None:
            return None
        said += found
        after = flow.at
        yield from flow.skip_space()
        if not (yield from flow.takes(";")):
            flow.at = after
            return said


def _python(flow: Flow) -> Calls:
    """Read a Python list of calls by keyword; JSON's words for true, false and null will do."""
    yield from flow.skip_space()
    start = flow.at
    if not (yield from _skip_brackets(flow)):
        return None
    text = flow.text[start : flow.at]
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call_of(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _json_list(text)


def _json_list(text: str) -> list[Said] | None:
    try:
        return json_calls(text) or None
    except ValueError:
        return None


def _skip_brackets(flow: Flow) -> Generator[None, None, bool]:
    """Move past what stands in brackets, and them; False where they do not match."""
    closers: list[str] = []
    while True:
        match = _PYTHON_PLAIN.match(flow.text, flow.at)
        assert match is not None  # nothing is a match, too
        flow.at = match.end()
        char = yield from flow.peek(1)
        if not char:
            return False
        if _PYTHON_PLAIN.fullmatch(char):
            continue  # more of it has come
        flow.at += 1
        if char in _PYTHON_CLOSERS and len(closers) < _MAX_DEPTH:
            closers.append(_PYTHON_CLOSERS[char])
        elif char in _STRINGS:
            if not (yield from _skip_quoted(flow, char)):
                return False
        elif not closers or char != closers.pop():
            return False
        if not closers:
            return True


def _skip_quoted(flow: Flow, quote: str) -> Generator[None, None, bool]:
    while True:
        match = _STRINGS[quote].match(flow.text, flow.at)
        assert match is not None  # nothing is a match, too
        flow.at = match.end()
        char = yield from flow.peek(1)
        if char == quote:
            flow.at += 1
            return True
        # A backslash at the end of what is there waits for what it escapes.
        if not char or (char == "\\" and len((yield from flow.peek(2))) < 2):
            return False


def _call_of(node: ast.expr) -> Said:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by keyword")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no call by keyword")
        arguments[keyword.arg] = _value_of(keyword.value)
    return Said(_name_of(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value_of(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            named = [None if key is None else _value_of(key) for key in keys]
            if not all(isinstance(key, str) for key in named):
                raise ValueError("names of members are strings")
            return dict(zip(named, map(_value_of, values), strict=True))
    value = ast.literal_eval(node)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError("no value of JSON")


LLAMA_JSON = BareCalls(
    "{",
    re.compile(r'\s*\{\s*"(name|type|function)"'),
    _objects,
    Written(head=f'{{"name": "{NAME}", "parameters": ', tail="}", between="; "),
    ("<|python_tag|>", "<|python_start|>"),
    "<|python_end|>",
)
# Python that follows a schema is more than a grammar says: calls that must come are JSON.
PYTHONIC = BareCalls(
    "[",
    re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\("),
    _python,
    LISTED,
    ("<|python_start|>",),
    "<|python_end|>",
)
LISTED_CALLS = BareCalls("[", re.compile(r'\s*\[\s*\{\s*"name"'), following_json, LISTED)
"""Of models whose own form is not known: what they are held to when they must call."""
