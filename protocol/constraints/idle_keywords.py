"""Idle keywords: keywords of a JSON schema that have no effect in their place."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeGuard

_OF_OBJECTS = frozenset(
    "propertyNames dependentSchemas dependentRequired dependencies unevaluatedProperties".split()
)
_CONTAINS = frozenset(["contains", "minContains", "maxContains"])
_OF_ARRAYS = _CONTAINS | {"uniqueItems", "unevaluatedItems"}
_CONDITION = frozenset(["if", "then", "else"])
_OF_NAMES = frozenset(["type", "minLength", "format"])


class IdleKeywords:
    """Finds idle keywords; `assertions` are all keywords that may restrict a value."""

    def __init__(self, assertions: frozenset[str]) -> None:
        self._assertions = assertions

    def find(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """Return the idle keywords of a schema, among those that no grammar can express."""
        idle: frozenset[str] = frozenset()
        if not _may_be("object", schema):
            idle |= _OF_OBJECTS
        if not _may_be("array", schema):
            idle |= _OF_ARRAYS
        if schema.get("not") is False:
            idle |= {"not"}
        branches = [schema[name] for name in ("then", "else") if name in schema]
        if "if" not in schema or all(map(self.allows_all, branches)):
            idle |= _CONDITION
        return idle | self._of_objects(schema) | self._of_arrays(schema)

    def allows_all(self, schema: object) -> bool:
        """Say whether a schema obviously allows any value."""
        return schema is True or (isinstance(schema, dict) and self._assertions.isdisjoint(schema))

    def _of_objects(self, schema: Mapping[str, Any]) -> frozenset[str]:
        required = _names(schema.get("required")) or frozenset()
        idle = []
        for keyword in ("dependentSchemas", "dependentRequired", "dependencies"):
            value = schema.get(keyword)
            if isinstance(value, dict) and all(
                self.allows_all(one) or _are_among(one, {name, *required})
                for name, one in value.items()
            ):
                idle.append(keyword)
        names = schema.get("propertyNames")
        if self.allows_all(names) or (isinstance(names, dict) and self._is_any_name(names)):
            idle.append("propertyNames")
        return frozenset(idle)

    def _is_any_name(self, names: Mapping[str, Any]) -> bool:
        others = self._assertions & names.keys() - _OF_NAMES
        return _may_be("string", names) and not others and names.get("minLength", 0) == 0

    def _of_arrays(self, schema: Mapping[str, Any]) -> frozenset[str]:
        idle: frozenset[str] = frozenset()
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        is_short = _is_number(most) and most <= 1
        if schema.get("uniqueItems") is False or is_short:
            idle |= {"uniqueItems"}
        items = schema.get("items")
        if self.allows_all(schema.get("unevaluatedItems")) or isinstance(items, dict | bool):
            idle |= {"unevaluatedItems"}
        if "contains" not in schema:
            return idle | _CONTAINS
        if "maxContains" not in schema:
            times = schema.get("minContains", 1)
            is_met = self.allows_all(schema["contains"]) and _is_number(least) and least >= 1
            if times == 0 or (times == 1 and is_met):
                idle |= _CONTAINS
        return idle


def _names(value: object) -> frozenset[str] | None:
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return frozenset(value)
    return None


def _are_among(value: object, known: AbstractSet[str]) -> bool:
    names = _names(value)
    return names is not None and names <= known


def _may_be(kind: str, schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds is None or kind == kinds or (isinstance(kinds, list) and kind in kinds)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
