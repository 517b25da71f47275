"""Custom tools: functions whose only argument is a text, `input`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

from .constraints.look_ahead import has_unmatched_parenthesis
from .errors import RequestError
from .validation import has_open_escape, short_repr

_OWN_FIELDS = ("type", "format", "parameters", "strict")
# Its white space is bounded: longer arguments without a match do not begin with the text.
_BEGINNING: Final = re.compile(r'\s{0,32}\{\s{0,32}"input"\s{0,32}:\s{0,32}"')
_MAX_BEGINNING_CHARS: Final = 256
_HEX: Final = "[0-9a-fA-F]"
_FIRST_HALF: Final = f"[dD][89abAB]{_HEX}{{2}}"  # of a surrogate pair
_UNIT: Final = re.compile(
    r'(?P<plain>[^"\\]+)'
    rf"|(?P<pair>\\u{_FIRST_HALF}\\u[dD][c-fC-F]{_HEX}{{2}})"
    rf"|(?P<open>\\(?:u(?:{_HEX}{{0,3}}"
    rf"|{_FIRST_HALF}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?)?\Z)"
    rf"|\\u(?P<code>{_HEX}{{4}})"
    r"|(?P<escape>\\.)"
    r'|(?P<end>")',
    re.DOTALL,
)
"""One unit of the content of a JSON string; `open` is an escape that may continue."""

_ESCAPES: Final = dict(
    zip(
        (r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t"),
        ('"', "\\", "/", "\b", "\f", "\n", "\r", "\t"),
        strict=True,
    )
)
_REPLACEMENT: Final = "\ufffd"


class FormatFault(Exception):
    """A wrong field of a tool's format; `path` is its place in the format."""

    def __init__(self, path: tuple[str, ...], words: str, value: object) -> None:
        super().__init__(words)
        self.path = path
        self.words = words
        self.value = value


def chat_function(place: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool as the function of a chat; raises `RequestError` for its format."""
    try:
        pattern = pattern_of(tool.get("format"))
    except FormatFault as fault:
        param = ".".join((f"tools.{place}.format", *fault.path))
        message = f"`{param}` {fault.words}; got {short_repr(fault.value)}."
        raise RequestError(message, param=param) from None
    others = {name: value for name, value in tool.items() if name not in _OWN_FIELDS}
    return others | function_fields(pattern)


def function_fields(pattern: str | None) -> dict[str, Any]:
    """Return the fields of a function whose input matches a pattern, if there is one."""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return {"parameters": parameters} | ({} if pattern is None else {"strict": True})


def arguments_of(text: str) -> str:
    """Return the function's arguments for a text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the text in the function's arguments, or the arguments if the model wrote others.

    Truncated arguments have the beginning of the text. Invalid escapes stay as they are.
    """
    stream = InputStream()
    return stream.add(arguments) + stream.end()


class InputStream:
    """The text in a function's arguments that arrive in pieces.

    Arguments that do not begin with the text are read at their end.
    """

    def __init__(self) -> None:
        self._before: list[str] = []  # the text
        self._may_begin = True
        self._has_begun = False
        self._has_ended = False
        self._open = ""  # an escape that may continue

    def add(self, piece: str) -> str:
        """Return the new text of a piece."""
        if not self._has_begun:
            self._before.append(piece)
            piece = self._after_beginning()
        if not self._has_begun or self._has_ended:
            return ""
        content, self._open = self._open + piece, ""
        texts = []
        for unit in _UNIT.finditer(content):
            if unit["end"]:
                self._has_ended = True
                break
            if unit["open"]:
                self._open = unit[0]
                break
            texts.append(_decoded(unit))
        return "".join(texts)

    def end(self) -> str:
        """Return the rest of the text."""
        return "" if self._has_begun else _other_input("".join(self._before))

    def _after_beginning(self) -> str:
        if not self._may_begin:
            return ""
        text = "".join(self._before)
        begun = _BEGINNING.match(text)
        if begun is None:
            self._may_begin = len(text) <= _MAX_BEGINNING_CHARS
            return ""
        self._has_begun = True
        self._before.clear()
        return text[begun.end() :]


def _decoded(unit: re.Match[str]) -> str:
    if unit["pair"]:
        pair: str = json.loads(f'"{unit[0]}"')
        return pair
    if unit["code"]:
        code = int(unit["code"], 16)
        return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)
    return _ESCAPES.get(unit[0], unit[0])


def _other_input(arguments: str) -> str:
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get("input", None if value else "") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def pattern_of(given: object) -> str | None:
    """Return the regular expression of a tool's format, None for any text; raises FormatFault.

    In a chat the grammar is an object within the format.
    """
    if given is None:
        return None
    if not isinstance(given, dict):
        raise FormatFault((), "must be an object", given)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind != "grammar":
        raise FormatFault(("type",), "must be 'text' or 'grammar'", kind)
    path: tuple[str, ...] = ()
    grammar: dict[str, Any] = given
    if isinstance(given.get("grammar"), dict):
        grammar, path = given["grammar"], ("grammar",)
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax != "regex":
        words = "must be 'regex': other grammars are not supported"
        raise FormatFault((*path, "syntax"), words, syntax)
    path = (*path, "definition")
    if not isinstance(definition, str) or not definition or has_open_escape(definition):
        raise FormatFault(path, "must be a regular expression", definition)
    if has_unmatched_parenthesis(definition):
        raise FormatFault(path, "has an unmatched parenthesis", definition)
    return f"^(?:{definition})$"
