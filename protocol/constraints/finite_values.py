"""Finite values of a JSON schema: those that it allows if they are few, such as an `enum`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .schema_facts import Schema, SchemaFacts

MAX_VALUES: Final = 255
"""Most values of a set whose distribution is computed, as in decisions."""


class SchemaValues:
    """Values and members of schemas within a `root`."""

    def __init__(self, root: Schema) -> None:
        self._facts = SchemaFacts(root)

    def member(self, schema: Schema, key: str | int) -> Schema:
        """Return the schema of an object's property or an array's item; True if unknown."""
        fact = self._facts.infer(schema).get("array" if isinstance(key, int) else "object")
        return True if fact is None else fact.member(key)

    def properties(self, schema: Schema) -> Mapping[str, Schema]:
        """Return the schemas of the properties that an object's schema lists."""
        fact = self._facts.infer(schema).get("object")
        members = {} if fact is None else fact.members
        return {name: member for name, member in members.items() if isinstance(name, str)}

    def is_text(self, schema: Schema) -> bool:
        """Say whether a schema allows only strings."""
        return [*self._facts.infer(schema)] == ["string"]

    def finite(self, schema: Schema) -> list[Any] | None:
        """Return all values of a schema in their order there; None for more than `MAX_VALUES`."""
        values: list[Any] = []
        for fact in self._facts.infer(schema).values():
            if fact.values is None or len(fact.values) > MAX_VALUES:
                return None
            values += fact.values
        place = {value_text(value): i for i, value in enumerate(self._listed(schema))}
        values.sort(key=lambda value: (place.get(value_text(value), len(place)), _rank(value)))
        return values if 0 < len(values) <= MAX_VALUES else None

    def _listed(self, schema: Schema) -> list[Any]:
        """Return the values that a schema lists itself, or where it refers to."""
        if isinstance(schema, dict) and "$ref" in schema:
            schema = self._facts.target(schema["$ref"])
        listed = schema.get("enum") if isinstance(schema, dict) else None
        return listed if isinstance(listed, list) else []


def value_text(value: object) -> str:
    """Return a value as a constrained model writes it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def _rank(value: object) -> tuple[bool, bool, str]:
    """Order true before false, and null last."""
    return value is None, value is False, value_text(value)
