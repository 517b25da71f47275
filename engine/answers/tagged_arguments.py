"""Calls whose arguments stand between tags, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

from engine.answers.flow import Flow
from engine.answers.json_text import loaded

_END = "</tool_call>"
# Another call ends what was not: else a text of many beginnings would be read once for each.
_NEXT = ("<tool_call>", "<parameter=", "</parameter>", "</function>", "</tool_call>")


def read_function(flow: Flow) -> Generator[None, None, tuple[str, str] | None]:
    """Read what follows `<function=`: the name, and the arguments as a JSON text.

    A value is a text unless the function's schema says otherwise, and it reads as such.
    """
    name = yield from flow.word()
    if not name or not (yield from flow.takes(">")):
        return None
    schema = flow.tools.get(name, {})
    arguments: dict[str, Any] = {}
    while True:
        yield from flow.skip_space()
        if not (yield from flow.takes("<parameter=")):
            break
        key = yield from flow.word()
        if not (yield from flow.takes(">")):
            return None
        value, mark = yield from flow.until(_NEXT)
        if mark in (None, "<tool_call>"):
            return None
        if mark != "</parameter>":  # left out: what follows begins anew
            flow.at -= len(mark)
        arguments[key] = _value_of(value.removeprefix("\n").removesuffix("\n"), key, schema)
    if not (yield from flow.takes("</function>")):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def read_pairs(flow: Flow) -> Generator[None, None, tuple[str, str] | None]:
    """Read a bare name and pairs of key and value in tags; the same comes of it."""
    name = yield from flow.word()
    schema = flow.tools.get(name, {})
    arguments: dict[str, Any] = {}
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
        arguments[key.strip()] = _value_of(value, key.strip(), schema)
    # Without the end this would be any text that begins with a word.
    end = yield from flow.peek(len(_END))
    if not name or end != _END:
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _value_of(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    properties = schema.get("properties")
    said = properties.get(key) if isinstance(properties, dict) else None
    kinds = said.get("type") if isinstance(said, dict) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "string" in (kinds or ["string"]) and not (text == "null" and "null" in (kinds or [])):
        return text
    try:
        return loaded(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
