"""Structural tags: free text with parts in a given format, as in SGLang, vLLM and XGrammar.

Both of their forms are parsed to one tree of formats, each an object with a `type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..errors import RequestError
from ..validation import has_open_escape, short_repr
from .automata import check_grammar
from .look_ahead import LookAroundError, looks_around, plain_texts
from .schemas import SchemaRules, served_schema
from .sizes import TooLarge

MAX_FORMATS = 200
_Node = dict[str, Any]


def served_tag(value: object, param: str) -> _Node:
    """Return the tree of a structural tag; `RequestError` has the place of an unsupported part."""
    reading = _Reading(param)
    tag = reading.of_object(value, "")
    if "structures" in tag or "triggers" in tag:
        return reading.of_structures(tag)
    return reading.format(tag.get("format"), "/format")


class _Reading:
    """Parser of one tag; `place` is the JSON pointer of a part."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._num_formats = 0
        self._readers: Mapping[str, Callable[[_Node, str], _Node]] = {
            "const_string": lambda node, place: {"value": self._text(node, "value", place)},
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._elements,
            "or": self._elements,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def of_structures(self, tag: _Node) -> _Node:
        """Return the tree for the older form: structures (begin, schema, end) and triggers."""
        tags = [
            {
                "type": "tag",
                "begin": self._text(one, "begin", f"/structures/{i}"),
                "content": {"type": "json_schema", "json_schema": one.get("schema")},
                "end": self._text(one, "end", f"/structures/{i}", may_be_empty=True),
            }
            for i, one in enumerate(self._objects(tag, "structures", ""))
        ]
        found = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        return self.format(found, "")

    def format(self, value: object, place: str) -> _Node:
        """Return a format with its nested formats."""
        node = self.of_object(value, place)
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            self._fail(place, f"is one of more than {MAX_FORMATS} formats: too many")
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in self._readers:
            self._fail(f"{place}/type", f"must be one of {', '.join(self._readers)}")
        return {"type": kind, **self._readers[kind](node, place)}

    def of_object(self, value: object, place: str) -> _Node:
        """Return the value, which must be an object."""
        if not isinstance(value, dict):
            self._fail(place, f"must be an object; got {short_repr(value)}")
        return value

    def _json_schema(self, node: _Node, place: str) -> _Node:
        schema = node.get("json_schema")
        if schema is None:
            self._fail(f"{place}/json_schema", "is required")
        return {"json_schema": served_schema(schema, self._param, SchemaRules())}

    def _grammar(self, node: _Node, place: str) -> _Node:
        source = self._text(node, "grammar", place)
        try:
            check_grammar(source)
        except TooLarge as exc:
            self._fail(f"{place}/grammar", str(exc))
        return {"grammar": source}

    def _regex(self, node: _Node, place: str) -> _Node:
        pattern = self._text(node, "pattern", place)
        if has_open_escape(pattern):
            self._fail(f"{place}/pattern", "ends in an unescaped backslash")
        try:
            if looks_around(pattern):
                plain_texts(pattern)
        except LookAroundError as exc:
            self._fail(f"{place}/pattern", f"is {short_repr(pattern)}: {exc}")
        return {"pattern": pattern}

    def _any_text(self, node: _Node, place: str) -> _Node:
        if node.get("excludes"):
            self._fail(f"{place}/excludes", "is not supported")
        return {}

    def _elements(self, node: _Node, place: str) -> _Node:
        elements = self._objects(node, "elements", place)
        return {
            "elements": [
                self.format(one, f"{place}/elements/{i}") for i, one in enumerate(elements)
            ]
        }

    def _tag(self, node: _Node, place: str) -> _Node:
        return {
            "begin": self._text(node, "begin", place, may_be_empty=True),
            "content": self.format(node.get("content"), f"{place}/content"),
            "end": self._text(node, "end", place, may_be_empty=True),
        }

    def _tags(self, node: _Node, place: str) -> _Node:
        tags = []
        for i, one in enumerate(self._objects(node, "tags", place)):
            if one.get("type", "tag") != "tag":
                self._fail(f"{place}/tags/{i}/type", "must be tag")
            tags.append(self.format({**one, "type": "tag"}, f"{place}/tags/{i}"))
        flags = {name: bool(node.get(name)) for name in ("at_least_one", "stop_after_first")}
        return {"tags": tags, **flags}

    def _triggered_tags(self, node: _Node, place: str) -> _Node:
        triggers = node.get("triggers")
        if not isinstance(triggers, list) or not triggers:
            self._fail(f"{place}/triggers", "must be a list of strings")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            self._fail(f"{place}/triggers", "must contain only non-empty strings")
        served = self._tags(node, place)
        for i, tag in enumerate(served["tags"]):
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                self._fail(f"{place}/tags/{i}/begin", "must start with one of the triggers")
        return {"triggers": triggers, **served}

    def _tags_with_separator(self, node: _Node, place: str) -> _Node:
        separator = self._text(node, "separator", place, may_be_empty=True)
        return {"separator": separator, **self._tags(node, place)}

    def _objects(self, node: _Node, name: str, place: str) -> list[_Node]:
        values = node.get(name)
        if not isinstance(values, list) or not values:
            self._fail(f"{place}/{name}", f"must be a list of objects; got {short_repr(values)}")
        return [self.of_object(one, f"{place}/{name}/{i}") for i, one in enumerate(values)]

    def _text(self, node: _Node, name: str, place: str, *, may_be_empty: bool = False) -> str:
        value = node.get(name, "" if may_be_empty else None)
        if not isinstance(value, str) or not (value or may_be_empty):
            self._fail(f"{place}/{name}", f"must be a string; got {short_repr(value)}")
        return value

    def _fail(self, place: str, words: str) -> NoReturn:
        where = f"`{place}` of `{self._param}`" if place else f"`{self._param}`"
        raise RequestError(f"{where} {words}.", param=self._param, code="invalid_schema")
