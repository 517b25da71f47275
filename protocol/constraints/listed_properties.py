"""Listed properties: the names that an object may have by all schemas of the same value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from .schema_facts import Schema, resolved

MAX_NAMES = 50_000
"""Limit of names that are compared for one schema."""

CHOICES = ("oneOf", "anyOf")
KINDS = ("properties", "patternProperties")
REST = "unevaluatedProperties"

_MAX_DEPTH = 60
_MAX_NODES = 200_000  # limit of schemas searched for references, some of them several times
_MEMBERS = frozenset(["items", "additionalItems", "additionalProperties", "prefixItems", REST])
_NAMED = frozenset([*KINDS, "$defs", "definitions"])
_PARTS = frozenset(["allOf", *CHOICES])

Names = dict[tuple[str, str], None]
"""Properties in order, each with its keyword (one of `KINDS`) and its name or pattern."""
Node = dict[str, Any]
"""JSON schema that is an object and has the right form."""


class TooManyNames(Exception):
    """More names or copies than allowed, or a longer chain of schemas of the same value."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Properties at one place: listed `names`, `required` ones, and both kinds by a choice.

    `is_open` is set if the schema itself allows any other property or all values are known,
    `may_be_open` if a branch does, and `is_shut` if it allows no others.
    """

    names: Names = field(default_factory=dict)
    required: Names = field(default_factory=dict)
    maybe: Names = field(default_factory=dict)
    maybe_required: Names = field(default_factory=dict)
    is_open: bool = False
    may_be_open: bool = False
    is_shut: bool = False
    is_finite: bool = False

    @property
    def lists_any(self) -> bool:
        """Say whether properties are listed."""
        return bool(self.names or self.maybe)

    @property
    def listed(self) -> Names:
        """All properties that are listed."""
        return self.names | self.maybe

    @property
    def needed(self) -> Names:
        """All properties that are required."""
        return self.required | self.maybe_required

    @property
    def is_settled(self) -> bool:
        """Say whether the schema itself defines which other properties an object may have."""
        return self.is_open or self.is_shut


_NOTHING = Listing()


class Unit(NamedTuple):
    """Subschemas of the same value: a `keyword` with a listing, and a place in `allOf`."""

    keyword: str
    place: int
    listing: Listing


class Listings:
    """Listings of the schemas within a `root`; without `resolves` no reference is followed."""

    def __init__(self, root: Node, *, resolves: bool) -> None:
        self._root = root
        self._resolves = resolves
        nodes = [*_nodes(root)]
        self.values = [node for node, is_value in nodes if is_value]
        self._nodes = {id(node) for node, _ in nodes}
        self._references = [node["$ref"] for node, _ in nodes if "$ref" in node]
        self._anchors = {node["$anchor"]: node for node, _ in nodes if "$anchor" in node}
        # By identity, together with the schemas to keep them alive.
        self._listings: dict[int, tuple[Schema, Listing]] = {}
        self._num_names = 0
        self._depth = 0

    def target(self, reference: str) -> Schema:
        """Return the target schema of a reference; True if it is outside this schema."""
        found = self._anchors.get(reference[1:]) or resolved(self._root, reference)
        return found if id(found) in self._nodes else True

    def listing(self, schema: Schema) -> Listing:
        """Return the properties that a schema lists, with those of subschemas of the same value."""
        if not isinstance(schema, dict) or not allows_objects(schema):
            return _NOTHING
        if id(schema) in self._listings:
            return self._listings[id(schema)][1]
        self._listings[id(schema)] = schema, _NOTHING  # for a schema that refers to itself
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise TooManyNames
        listing = self.own(schema)
        for unit in self.units(schema):
            listing = self._joined(listing, unit.listing)
        if REST in schema:
            is_shut = schema[REST] is False
            listing = replace(listing, is_shut=is_shut, is_open=not is_shut)
        self._depth -= 1
        self._listings[id(schema)] = schema, listing
        return listing

    def own(self, node: Node) -> Listing:
        """Return the properties that the keywords of the schema itself list."""
        names: Names = {}
        for keyword in KINDS:
            for name, one in node.get(keyword, {}).items():
                if one is not False:
                    names[keyword, name] = None
        required = {("properties", name): None for name in node.get("required", ())}
        rest = node.get("additionalProperties")
        values = [*node.get("enum", ()), node.get("const")]
        is_finite = any(isinstance(value, dict) for value in values)
        return Listing(
            names,
            required,
            is_open=is_finite or (rest is not None and rest is not False),
            is_shut=rest is False,
            is_finite=is_finite,
        )

    def units(self, node: Node) -> list[Unit]:
        """Return the subschemas of the same value, in the order in which they are joined."""
        units = []
        if "$ref" in node:
            target = self.target(node["$ref"])
            listing = self.listing(target) if self._resolves else Listing(is_open=True)
            units.append(Unit("$ref", -1, listing))
        choices = [keyword for keyword in CHOICES if keyword in node]
        units += [Unit(keyword, -1, self._either(node[keyword])) for keyword in choices]
        parts = [*enumerate(node.get("allOf", ()))]
        return units + [Unit("allOf", i, self.listing(one)) for i, one in parts]

    def _joined(self, one: Listing, other: Listing) -> Listing:
        names = one.names | other.names
        maybe = one.maybe | other.maybe
        self.count(names)
        self.count(maybe)
        return Listing(
            names,
            one.required | other.required,
            maybe,
            one.maybe_required | other.maybe_required,
            one.is_open or other.is_open,
            one.may_be_open or other.may_be_open,
            one.is_shut or other.is_shut,
            one.is_finite or other.is_finite,
        )

    def _either(self, branches: Iterable[Schema]) -> Listing:
        listings = [self.listing(one) for one in branches if one is not False]
        maybe: Names = {}
        required: Names = {}
        for listing in listings:
            self.count(listing.names)
            self.count(listing.maybe)
            maybe |= listing.listed
            required |= listing.needed
        return Listing(
            maybe=maybe,
            maybe_required=required,
            is_open=bool(listings) and all(listing.is_open for listing in listings),
            may_be_open=any(one.is_open or one.may_be_open for one in listings),
            is_shut=bool(listings) and all(listing.is_shut for listing in listings),
            is_finite=any(listing.is_finite for listing in listings),
        )

    def count(self, names: Names) -> None:
        """Count names that are compared; raises `TooManyNames` above the limit."""
        self._num_names += len(names)
        if self._num_names > MAX_NAMES:
            raise TooManyNames

    def leads_to_loop(self, reference: str) -> bool:
        """Say whether a reference leads to one that leads to itself.

        llguidance does not follow such a reference if its schema is joined with others.
        """
        return id(self.target(reference)) in self._loops

    @cached_property
    def _loops(self) -> frozenset[int]:
        """Targets of references that lead to an endless chain of references."""
        leads: dict[int, set[int]] = {}
        num_nodes = 0
        for reference in self._references:
            target = self.target(reference)
            if isinstance(target, dict) and id(target) not in leads:
                nodes = [node for node, _ in _nodes(target)]
                num_nodes += len(nodes)
                if num_nodes > _MAX_NODES:
                    raise TooManyNames
                inner = [self.target(node["$ref"]) for node in nodes if "$ref" in node]
                leads[id(target)] = {id(one) for one in inner if isinstance(one, dict)}
        led_by: dict[int, list[int]] = {}
        for source, targets in leads.items():
            for one in targets:
                led_by.setdefault(one, []).append(source)
        ends = [key for key, targets in leads.items() if not targets]
        while ends:
            end = ends.pop()
            for source in led_by.get(end, ()):
                leads[source].discard(end)
                if not leads[source]:
                    ends.append(source)
        return frozenset(key for key, targets in leads.items() if targets)


def allows_objects(schema: Schema) -> bool:
    """Say whether a schema's type allows objects."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type", "object")
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)


def _nodes(root: Schema) -> Iterator[tuple[Node, bool]]:
    """Yield each object in a schema once, and whether it describes a value or a definition."""
    seen: set[int] = set()
    waiting: list[tuple[Schema, bool]] = [(root, True)]
    while waiting:
        node, is_value = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node, is_value
        for keyword, value in node.items():
            if keyword in _NAMED:
                waiting += [(one, True) for one in value.values()]
            elif keyword in _PARTS:
                waiting += [(one, False) for one in value]
            elif keyword in _MEMBERS:
                waiting += [(one, True) for one in (value if isinstance(value, list) else [value])]
