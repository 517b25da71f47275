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
_BEGINNING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HALF: Final = "[dD][89a-fA-F]"  # the beginning of one half of a surrogate pair
_HEX: Final = "[0-9a-fA-F]"
_TEXT: Final = re.compile(
    rf'(?:[^"\\]|\\[^u]|\\u(?!{_HALF}){_HEX}{{4}}'
    rf"|\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})*"
)


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

    Truncated arguments have the beginning of the text.
    """
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get("input", None if value else "") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class InputStream:
    """The text in a function's arguments that arrive in pieces.

    Arguments that do not begin with the text are read at their end.
    """

    def __init__(self) -> None:
        self._held = ""
        self._beginning: str | None = None  # until some text has been returned
        self._has_begun = False
        self._has_ended = False

    def add(self, piece: str) -> str:
        """Return the new text of a piece."""
        if self._has_ended:
            return ""
        self._held += piece
        if not self._has_begun:
            begun = _BEGINNING.match(self._held)
            if begun is None:
                return ""
            self._has_begun, self._beginning = True, begun[0]
            self._held = self._held[begun.end() :]
        found = _TEXT.match(self._held)
        text = "" if found is None else found[0]
        self._held = self._held[len(text) :]
        self._has_ended = self._held.startswith('"')
        if text or self._has_ended:
            self._beginning = None
        try:
            decoded: str = json.loads(f'"{text}"', strict=False)
        except ValueError:  # an escape that JSON does not have
            return text
        return decoded

    def end(self) -> str:
        """Return the rest of the text."""
        if self._has_begun and self._beginning is None:
            return ""
        return input_of((self._beginning or "") + self._held)


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
