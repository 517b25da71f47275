"""Calls of tools without marks, mostly the whole answer: JSON as Llama 3 writes it, or Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.answers.calls import (
    UNREAD,
    Calls,
    Said,
    following_json,
    json_calls,
    names_tools,
    tell,
)
from engine.answers.flow import Flow, Waiting
from engine.answers.json_text import pass_value
from engine.answers.written import LISTED, NAME, Written

_MAX_DEPTH = 64
_PYTHON_PLAIN = re.compile(r"[^\[\](){}\"']*")
_PYTHON_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_STRINGS = {quote: re.compile(rf"(?:[^\\{quote}]|\\.)*", re.DOTALL) for quote in "'\""}
_NAMES = {"true": True, "false": False, "null": None}


class _Follows(Protocol):
    def __call__(self, flow: Flow) -> Calls:
        """Return the calls that stand here, or None."""


class _Leads(Protocol):
    def __call__(self, flow: Flow) -> Generator[None, None, bool]:
        """Say whether calls may stand here; where they do not, move past what is none."""


@dataclass(frozen=True, slots=True)
class BareCalls:
    """Calls that an answer consists of, or that stand in it without a mark; a `CallForm`.

    One of `begins` begins them, and `leads` looks whether that is so. They name tools of the
    request and have arguments: all else is content, of which `looks_like` finds what is told to be
    unread. Where a mark says that calls come, `opens`, with `closes` behind them, any are read.
    """

    begins: tuple[str, ...]
    leads: _Leads
    looks_like: tuple[re.Pattern[str], ...]
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
        if flow.is_held:  # to calls that come first, or to none
            start = flow.at
            yield from flow.skip_space()
            if (yield from flow.peek(1)) == self.writes.begins[0]:
                yield from self._unmarked(flow)
            else:
                flow.at = start
        marks = self.opens if flow.is_held else (*self.begins, *self.opens)
        while (mark := (yield from flow.pass_on(marks, flow.say))) is not None:
            if mark in self.opens:
                yield from self._marked(flow, mark)
            else:
                flow.unread(mark)
                yield from self._unmarked(flow)

    def _marked(self, flow: Flow, mark: str) -> Waiting:
        said = yield from self.follows(flow)
        if said is None:
            flow.warn(UNREAD)
            flow.at = 0  # `pass_on` has dropped all before
            flow.say(mark)
        else:
            yield from self._tell(flow, said)

    def _unmarked(self, flow: Flow) -> Waiting:
        """Read calls that no mark announces; what is none is said up to where that was clear."""
        start = flow.at
        said = (yield from self.follows(flow)) if (yield from self.leads(flow)) else None
        if said is not None and names_tools(flow, said):
            yield from self._tell(flow, said)
            return
        text = flow.text[start : flow.at]
        found = [match for pattern in self.looks_like for match in pattern.finditer(text)]
        if any(match["name"] in flow.tools or match["arguments"] for match in found):
            flow.warn(UNREAD)
        flow.say(flow.text[: flow.at])
        flow.drop()

    def _tell(self, flow: Flow, said: Sequence[Said]) -> Waiting:
        if self.closes is not None:
            yield from flow.skip_space()
            yield from flow.takes(self.closes)
        tell(flow, said)


def _leads_to_objects(flow: Flow) -> Generator[None, None, bool]:
    """Look at the first member of an object, or of the first in a list: what names a tool leads.

    Else what is JSON is said as it comes: an answer.
    """
    start = flow.at
    yield from flow.takes("[")
    yield from flow.skip_space()
    if (yield from flow.takes("{")):
        yield from flow.skip_space()
        key = yield from _quoted(flow)
        yield from flow.skip_space()
        if key in _KEYS and (yield from flow.takes(":")):
            yield from flow.skip_space()
            name = (yield from _quoted(flow)) if key == "name" else None
            if key != "name" or name in flow.tools or (yield from _has_arguments(flow)):
                flow.at = start
                return True
    flow.at = start
    yield from pass_value(flow)
    return False


def _quoted(flow: Flow) -> Generator[None, None, str | None]:
    """Move past a short string without escapes, and return it."""
    if not (yield from flow.takes('"')):
        return None
    name = yield from flow.word()
    return name if (yield from flow.takes('"')) else None


def _has_arguments(flow: Flow) -> Generator[None, None, bool]:
    """Say whether arguments are the next member."""
    yield from flow.skip_space()
    if not (yield from flow.takes(",")):
        return False
    yield from flow.skip_space()
    return (yield from flow.takes_any(('"parameters"', '"arguments"'))) is not None


def _leads_to_python(flow: Flow) -> Generator[None, None, bool]:
    """Look whether a list begins with a call of a tool, or by keyword, or with an object."""
    start = flow.at
    if not (yield from flow.takes("[")):
        yield from pass_value(flow)
        return False
    yield from flow.skip_space()
    if (yield from flow.peek(1)) == "{":
        flow.at = start
        return (yield from _leads_to_objects(flow))
    name = yield from flow.word()
    is_call = bool(name) and (yield from flow.takes("("))
    if is_call and name not in flow.tools:
        yield from flow.skip_space()
        is_call = yield from flow.takes(")")
        if not is_call and (yield from flow.word()):
            yield from flow.skip_space()
            is_call = yield from flow.takes("=")
    flow.at = start if is_call else start + 1
    return is_call


def _objects(flow: Flow) -> Calls:
    """Read objects with semicolons between them, as Llama 3 writes calls."""
    said: list[Said] = []
    after = flow.at
    while True:
        found = yield from following_json(flow)
        if found is None or (said and not names_tools(flow, found)):
            flow.at = after if said else flow.at
            return said or None
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
    if (yield from flow.peek(1)) != "[" or not (yield from _skip_brackets(flow)):
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


_KEYS = frozenset(["name", "type", "function", "parameters", "arguments", "id"])
_JSON_CALL = re.compile(
    r'"(?:name|function)"\s*:\s*"(?P<name>[^"\\]{1,200})"'
    r'(?P<arguments>\s*,\s*"(?:parameters|arguments)"\s*:)?'
)
LLAMA_JSON = BareCalls(
    ("{", "["),
    _leads_to_objects,
    (_JSON_CALL,),
    _objects,
    Written(head=f'{{"name": "{NAME}", "parameters": ', tail="}", between="; "),
    ("<|python_tag|>", "<|python_start|>"),
    "<|python_end|>",
)
# Python that follows a schema is more than a grammar says: calls that must come are JSON.
PYTHONIC = BareCalls(
    ("[", "{"),
    _leads_to_python,
    (_JSON_CALL, re.compile(r"\[\s*(?P<name>[A-Za-z_][\w.]*)\((?P<arguments>\s*\w+\s*=)?")),
    _python,
    LISTED,
    ("<|python_start|>",),
    "<|python_end|>",
)
LISTED_CALLS = BareCalls(("[",), _leads_to_objects, (_JSON_CALL,), following_json, LISTED)
"""Of models whose own form is not known: what they are held to when they must call."""
