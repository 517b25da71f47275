"""Facts of a JSON schema: the types, values and members it allows, through references and unions.

Facts are a superset: every value that a schema allows is within its facts. Work is bounded, so
that no schema takes more than milliseconds, even with circular references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

MAX_WORK = 12_000
_MAX_DEPTH = 40
_MAX_VALUES = 4_096  # in one set
_MAX_POSITIONS = 16  # in arrays, whose items are compared one by one
_FINITE = {"null": frozenset([None]), "boolean": frozenset([True, False])}
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_LIMITS = {
    "object": ("minProperties", "maxProperties"),
    "array": ("minItems", "maxItems"),
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
}
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")

_Known = TypeVar("_Known")
Schema = Any
"""JSON schema as the client sent it: an object or a boolean; any other value allows anything."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Facts of the values of one type.

    `values` are all possible scalars, None for any. A number, length or count is between `low` and
    `high`; the second item of each is 1 or -1 if the bound is exclusive. `required` has the names
    (in arrays, the indices) that every value has; `members` has the schemas of members by name, and
    `rest` the schema of all others. `is_free` is set for a string that may be any text.
    """

    values: frozenset[Any] | None = None
    low: tuple[float, int] | None = None
    high: tuple[float, int] | None = None
    required: frozenset[str | int] = frozenset()
    members: Mapping[str | int, Schema] = field(default_factory=dict)
    rest: Schema = True
    is_free: bool = True

    def member(self, name: str | int) -> Schema:
        """Return the schema of a member."""
        return self.members.get(name, self.rest)


Facts = Mapping[str, Fact]
"""Facts of a schema's values by type; types that are missing are not allowed."""

ANYTHING: Facts = {kind: Fact(values=_FINITE.get(kind)) for kind in _TYPES}


class SchemaFacts:
    """Infers facts of schemas within a `root`; without `resolves` no reference is followed.

    `work` counts steps; above `MAX_WORK` schemas are assumed to allow anything.
    """

    def __init__(self, root: Schema, *, resolves: bool = True) -> None:
        self._root = root
        self._resolves = resolves
        self._known: dict[int, tuple[Schema, Facts]] = {}  # by id, with the schema to keep it alive
        self.work = 0

    @property
    def is_exhausted(self) -> bool:
        """Say whether `work` is above its limit."""
        return self.work > MAX_WORK

    def infer(self, schema: Schema, depth: int = 0) -> Facts:
        """Return the facts of a schema nested in `depth` others."""
        if schema is False:
            return {}
        if not isinstance(schema, dict):
            return ANYTHING
        known = self._known.get(id(schema))
        if known is not None:
            return known[1]
        self.work += 1
        if depth > _MAX_DEPTH or self.is_exhausted:
            return ANYTHING
        self._known[id(schema)] = schema, ANYTHING  # for a schema that refers to itself
        parts = self._own(schema)
        if "$ref" in schema:
            parts.append(self.infer(self.target(schema["$ref"]), depth + 1))
        parts += [self.infer(one, depth + 1) for one in _listed(schema.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            if ways := _listed(schema.get(keyword)):
                parts.append(self._either([self.infer(way, depth + 1) for way in ways]))
        found = self._all(parts)
        self._known[id(schema)] = schema, found
        return found

    def _own(self, schema: Mapping[str, Any]) -> list[Facts]:
        """Return the facts of a schema's own keywords, without those of its subschemas."""
        kinds = schema.get("type", _TYPES)
        names = [kinds] if isinstance(kinds, str) else _listed(kinds)
        allowed = {"number" if name == "integer" else name for name in names if _is_text(name)}
        parts: list[Facts] = [
            {kind: _fact(kind, schema) for kind in _TYPES if kind in allowed or not names}
        ]
        if "const" in schema:
            parts.append(self._of_values([schema["const"]]))
        if isinstance(schema.get("enum"), list):
            parts.append(self._of_values(schema["enum"]))
        return parts

    def _of_values(self, values: Sequence[Any]) -> Facts:
        self.work += len(values) // 16
        scalars: dict[str, set[Any]] = {}
        others: list[Facts] = []
        for value in values:
            kind = type_of(value)
            if isinstance(value, dict | list):
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                members = {name: {"const": one} for name, one in pairs}
                self.work += len(members)
                fact = Fact(required=frozenset(members), members=members, rest=False)
                others.append({kind: fact})
            else:
                scalars.setdefault(kind, set()).add(value)
        return self._either(
            [{kind: Fact(values=frozenset(found)) for kind, found in scalars.items()}, *others]
        )

    def target(self, reference: object) -> Schema:
        """Return the schema that a reference resolves to; True if it is not in the root."""
        passed: set[int] = set()
        found: Schema = {"$ref": reference}
        while isinstance(found, dict) and found.keys() == {"$ref"}:
            reference = found["$ref"]
            if not self._resolves or not isinstance(reference, str) or id(found) in passed:
                return True
            passed.add(id(found))
            self.work += 1 + len(reference) // 64
            if self.is_exhausted:
                return True
            found = resolved(self._root, reference)
        return found

    def _all(self, parts: Sequence[Facts]) -> Facts:
        """Return the facts of the intersection."""
        parts = [part for part in parts if part is not ANYTHING]
        if len(parts) < 2:
            return parts[0] if parts else ANYTHING
        found = {
            kind: self._joined([part[kind] for part in parts], of_all=True)
            for kind in parts[0]
            if all(kind in part for part in parts)
        }
        return {kind: fact for kind, fact in found.items() if fact.values != frozenset()}

    def _either(self, parts: Sequence[Facts]) -> Facts:
        """Return the facts of the union."""
        if len(parts) == 1:
            return parts[0]
        kinds = dict.fromkeys(kind for part in parts for kind in part)
        return {
            kind: self._joined([part[kind] for part in parts if kind in part], of_all=False)
            for kind in kinds
        }

    def _joined(self, facts: Sequence[Fact], *, of_all: bool) -> Fact:
        if len(facts) == 1:
            return facts[0]
        names = dict.fromkeys(name for fact in facts for name in fact.members)
        self.work += len(facts) + len(names) * len(facts)
        if self.is_exhausted:
            return Fact()
        # A union has a bound only if all parts have one; an intersection has that of any part.
        lows = [fact.low for fact in facts if fact.low is not None]
        highs = [fact.high for fact in facts if fact.high is not None]
        required = [fact.required for fact in facts]
        join = _all_of if of_all else _any_of
        return Fact(
            self._values(facts, of_all=of_all),
            _chosen(lows, len(facts), max if of_all else min, of_all=of_all),
            _chosen(highs, len(facts), min if of_all else max, of_all=of_all),
            _united(required) if of_all else _common(required),
            {name: join([fact.member(name) for fact in facts]) for name in names},
            join([fact.rest for fact in facts]),
            all(fact.is_free for fact in facts) if of_all else any(fact.is_free for fact in facts),
        )

    def _values(self, facts: Sequence[Fact], *, of_all: bool) -> frozenset[Any] | None:
        """Return the intersection or the union of the values, or None if a set is too large."""
        known = {id(fact.values): fact.values for fact in facts if fact.values is not None}
        sets = [*known.values()]
        if not of_all and any(fact.values is None for fact in facts):
            return None
        if of_all and len(sets) > 1:
            sets = [one for one in sets if len(one) <= _MAX_VALUES] or sets[:1]
        if len(sets) < 2:
            return sets[0] if sets else None
        num_values = sum(map(len, sets))
        if not of_all and num_values > _MAX_VALUES:
            return None
        self.work += num_values // 16
        return _common(sets) if of_all else _united(sets)


def pointer_part(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolved(root: Schema, reference: str) -> Schema:
    """Return the target of a reference into a schema (`#`, and a JSON pointer); else True."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    found = root
    for key in unquote(reference[1:]).split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name[:9]) < len(found):
            found = found[int(name[:9])]
        else:
            return True
    return found


def type_of(value: object) -> str:
    """Return the JSON type of a value; an integer is a number."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "number"


def _fact(kind: str, schema: Mapping[str, Any]) -> Fact:
    """Return the fact of a schema's own keywords for one type."""
    if kind in _FINITE:
        return ANYTHING[kind]
    least, most = _LIMITS[kind]
    low, high = _bound(schema.get(least)), _bound(schema.get(most))
    if kind == "string":
        return Fact(low=low, high=high, is_free=not any(name in schema for name in _OF_STRINGS))
    if kind == "number":
        above, below = (_bound(schema.get(f"exclusiveM{end}imum")) for end in ("in", "ax"))
        lows = [one for one in (low, above and (above[0], 1)) if one is not None]
        highs = [one for one in (high, below and (below[0], -1)) if one is not None]
        return Fact(low=max(lows, default=None), high=min(highs, default=None))
    if kind == "array":
        return _fact_of_arrays(schema, low, high)
    members = schema.get("properties")
    required = frozenset(name for name in _listed(schema.get("required")) if _is_text(name))
    rest = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    known = members if isinstance(members, dict) else {}
    return Fact(low=low, high=high, required=required, members=known, rest=rest)


def _fact_of_arrays(
    schema: Mapping[str, Any], low: tuple[float, int] | None, high: tuple[float, int] | None
) -> Fact:
    rest = schema.get("items", True)
    first = _listed(schema.get("prefixItems"))
    if isinstance(rest, list):  # as in older drafts
        first, rest = rest, schema.get("additionalItems", True)
    least = 0 if low is None else int(max(0, min(low[0], _MAX_POSITIONS)))
    members: dict[str | int, Schema] = dict(enumerate(first[:_MAX_POSITIONS]))
    if len(first) > _MAX_POSITIONS:
        rest = True
    return Fact(low=low, high=high, required=frozenset(range(least)), members=members, rest=rest)


def _bound(value: object) -> tuple[float, int] | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is not equal to itself.
    return (value, 0) if is_number and value == value else None  # type: ignore[return-value]  # noqa: PLR0124


def _chosen(
    known: Sequence[_Known],
    wanted: int,
    choose: Callable[[Sequence[_Known]], _Known],
    *,
    of_all: bool,
) -> _Known | None:
    """Return the effective bound; None for a union in which a part has no bound."""
    return choose(known) if known and (of_all or len(known) == wanted) else None


def _common(sets: Sequence[frozenset[Any]]) -> frozenset[Any]:
    return frozenset.intersection(*sets)


def _united(sets: Sequence[frozenset[Any]]) -> frozenset[Any]:
    return frozenset.union(*sets)


def _all_of(schemas: Iterable[Schema]) -> Schema:
    left = {id(schema): schema for schema in schemas if schema is not True}
    if any(schema is False for schema in left.values()):
        return False
    return {"allOf": [*left.values()]} if len(left) > 1 else next(iter(left.values()), True)


def _any_of(schemas: Iterable[Schema]) -> Schema:
    left = {id(schema): schema for schema in schemas if schema is not False}
    if any(schema is True for schema in left.values()):
        return True
    return {"anyOf": [*left.values()]} if len(left) > 1 else next(iter(left.values()), False)


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _is_text(value: object) -> bool:
    return isinstance(value, str)
