"""Closing of objects: in generation, an object that lists its properties has no others.

With an open object a model invents properties until its tokens run out. An object stays open if its
schema explicitly opens it. As with `unevaluatedProperties`, an object has all properties listed at
its place: by `allOf`, by references, and by the chosen branch of each `anyOf` and `oneOf`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .listed_properties import (
    CHOICES,
    KINDS,
    REST,
    Listing,
    Listings,
    Names,
    Node,
    TooManyNames,
    Unit,
    allows_objects,
)
from .schema_facts import Schema

_MAX_CHARS = 2**18  # limit of copied characters
_MAX_PATTERNS = 16  # limit of patterns repeated at one place, because they are compared pairwise
_OF_PLACES = frozenset(["$defs", "definitions", "$schema", "$id", "id", "$anchor"])
_JOINING = frozenset(["$ref", "allOf", *CHOICES])


class Unclosable(ValueError):
    """An `unevaluatedProperties`, at a JSON pointer, that no grammar can express."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class _Outside(NamedTuple):
    """Context of a schema: names listed next to it, and the schema of all others, if it has one."""

    names: Names
    rest: Schema = None


_ALONE = _Outside({})


def close_objects(
    root: Node, *, resolves: bool = True, places: Mapping[int, str] | None = None
) -> None:
    """Close the objects in a schema, in place; without `resolves` no reference is followed.

    `places` are the JSON pointers of `unevaluatedProperties` by the identity of their schemas;
    raises `Unclosable` for one that cannot be enforced.
    """
    closing = _Closing(root, resolves=resolves, places=places or {})
    try:
        closing.run()
    except TooManyNames:
        if places:
            raise Unclosable(next(iter(places.values()))) from None


class _Closing:
    """Closes one schema; changes are collected first, so that all start from the original."""

    def __init__(self, root: Node, *, resolves: bool, places: Mapping[int, str]) -> None:
        self._resolves = resolves
        self._places = dict(places)
        self._listings = Listings(root, resolves=resolves)
        self._num_chars = 0
        self._copying: set[tuple[int, bool]] = set()

    def run(self) -> None:
        """Close all objects."""
        changed = [
            (node, new)
            for node in self._listings.values
            if (new := self._closed(node, _ALONE)) is not node
        ]
        for node, new in changed:
            node.clear()
            node.update(new)

    def _closed(self, schema: Schema, outside: _Outside, *, is_joined: bool = False) -> Schema:
        """Return a schema whose objects have only its names and those `outside`.

        `is_joined` is set if the same value has other schemas too.
        """
        if schema is False or not allows_objects(schema):
            return schema
        node = {} if schema is True else schema
        if REST in node:
            place = self._places.get(id(node), "")
            outside = _Outside({}, node[REST])
            node = {key: value for key, value in node.items() if key != REST}
            self._places[id(node)] = place
        if outside == _ALONE:
            closed = self._closed_alone(node, is_joined=is_joined or "type" in node)
            if closed is not None:
                return closed
        self._listings.count(outside.names)
        listing = self._listings.listing(node)
        if outside.rest is not None and (listing.is_finite or not self._resolves):
            raise Unclosable(self._places.get(id(node), ""))
        lists_any = outside.names or listing.lists_any
        if listing.is_settled or (outside.rest is None and not lists_any):
            return self._open(node)
        return self._closed_together(node, outside)

    def _closed_alone(self, node: Node, *, is_joined: bool) -> Node | None:
        """Return a closed schema, if that needs no comparison of names; otherwise None."""
        keywords = node.keys() - _OF_PLACES - {"type"}
        if keywords.isdisjoint(_JOINING):
            required = {("properties", name): None for name in node.get("required", ())}
            return _with_names(node, required) if _lists_any(node) else node
        if len(keywords) > 1:
            return None
        [keyword] = keywords
        if keyword == "$ref":  # its target is closed where it is
            if not (is_joined and self._listings.leads_to_loop(node["$ref"])):
                return node
            return self._with_part(node, self._copied(node["$ref"], _ALONE))
        parts = node[keyword]
        if keyword == "allOf" and sum(part not in (True, {}) for part in parts) != 1:
            return None
        closed = [
            part if part in (True, {}) else self._closed(part, _ALONE, is_joined=is_joined)
            for part in parts
        ]
        is_same = all(one is part for one, part in zip(closed, parts, strict=True))
        return node if is_same else {**node, keyword: closed}

    def _closed_together(self, node: Node, outside: _Outside) -> Node:
        """Return a closed schema: by its own names, or in each branch of its choices."""
        own, units = self._listings.own(node), self._listings.units(node)
        known = outside.names | own.names | own.required
        for unit in units:
            known |= unit.listing.names | unit.listing.required
        self._listings.count(known)
        splitting = [
            unit
            for unit in units
            if unit.listing.may_be_open
            or not (unit.listing.maybe | unit.listing.maybe_required).keys() <= known.keys()
        ]
        if len(units) == 1 and node.keys() - _OF_PLACES - {"type"} <= _JOINING:
            splitting = units
        if outside.rest is not None and len(splitting) > 1:
            raise Unclosable(self._places.get(id(node), ""))
        if not splitting:
            return self._with_all_names(node, outside, own, units)
        if len(splitting) > 1:  # an open branch leaves the others' names open too
            open_units = [unit for unit in splitting if unit.listing.may_be_open]
            splitting = open_units[:1] or splitting
        new: Node = self._open(node, {(unit.keyword, unit.place) for unit in splitting})
        for unit in splitting:
            others = [own, *(other.listing for other in units if other is not unit)]
            names = outside.names | self._names(others, outside)
            self._listings.count(names)
            new = self._replace(new, node, unit, _Outside(names, outside.rest))
        return new

    def _with_all_names(
        self, node: Node, outside: _Outside, own: Listing, units: Collection[Unit]
    ) -> Node:
        """Return a schema closed at its own place: it lists all names, in their order."""
        names = self._names([own, *(unit.listing for unit in units)], outside) | outside.names
        rest = False if outside.rest is None else outside.rest
        opened: Node = self._open(node)
        existing = node.get("patternProperties", {})
        added = [
            name for kind, name in names if kind == "patternProperties" and name not in existing
        ]
        if len(added) > _MAX_PATTERNS:
            if outside.rest is not None:
                raise Unclosable(self._places.get(id(node), ""))
            return opened
        return _with_names(opened, names, rest=rest)

    def _names(self, listings: Collection[Listing], outside: _Outside) -> Names:
        """Return the names of several listings, those that are only required last."""
        names: Names = {}
        for listing in listings:
            names |= listing.listed
        if outside.rest is None:  # otherwise a property that is only required is one of the rest
            for listing in listings:
                names |= listing.needed
        return names

    def _replace(self, new: Node, node: Node, unit: Unit, outside: _Outside) -> Node:
        """Return `new`, a copy of a schema, with the subschemas of one unit closed."""
        value = node[unit.keyword]
        if unit.keyword == "$ref":
            return self._with_part(new, self._copied(value, outside))
        if unit.keyword == "allOf":
            parts = [*new["allOf"]]
            parts[unit.place] = self._closed(value[unit.place], outside, is_joined=True)
        else:
            parts = [self._closed(branch, outside, is_joined=True) for branch in value]
        return {**new, unit.keyword: parts}

    def _open(self, schema: Schema, without: Collection[tuple[str, int]] = ()) -> Schema:
        """Return a schema that others close, because they are joined; `without` omits some units.

        A reference is replaced by a copy of its target, which is closed where it is.
        """
        if not isinstance(schema, dict):
            return schema
        if REST in schema:
            return self._closed(schema, _ALONE)
        new = dict(schema)
        for keyword in ("allOf", *CHOICES):
            if keyword in new and (keyword, -1) not in without:
                parts = new[keyword]
                opened = [
                    one if (keyword, i) in without else self._open(one)
                    for i, one in enumerate(parts)
                ]
                if any(one is not part for one, part in zip(opened, parts, strict=True)):
                    new[keyword] = opened
        if "$ref" in new and ("$ref", -1) not in without:
            listing = self._listings.listing(self._listings.target(new["$ref"]))
            is_closed = not listing.is_settled and listing.lists_any
            if is_closed or self._listings.leads_to_loop(new["$ref"]):
                new = self._with_part(new, self._copied(new["$ref"], None))
        is_same = new.keys() == schema.keys() and all(new[key] is schema[key] for key in new)
        return schema if is_same else new

    @staticmethod
    def _with_part(node: Node, part: Schema) -> Node:
        """Return a schema whose reference is replaced by a schema of the same value."""
        new: Node = {}
        for keyword, value in node.items():
            if keyword == "allOf":
                new["allOf"] = [*value, *new.get("allOf", ())]
            elif keyword == "$ref":
                new["allOf"] = [*new.get("allOf", ()), part]
            else:
                new[keyword] = value
        return new

    def _copied(self, reference: str, outside: _Outside | None) -> Schema:
        """Return a copy of a reference's target, closed or (`outside` is None) not closed."""
        target = self._listings.target(reference)
        if not isinstance(target, dict):
            return {"$ref": reference}
        key = id(target), outside is None
        copy = {name: value for name, value in target.items() if name not in _OF_PLACES}
        self._num_chars += len(json.dumps(copy))
        if key in self._copying or self._num_chars > _MAX_CHARS:
            raise TooManyNames
        self._places[id(copy)] = self._places.get(id(target), "")
        self._copying.add(key)
        made = self._open(copy) if outside is None else self._closed(copy, outside)
        self._copying.remove(key)
        return made


def _with_names(node: Node, names: Names, *, rest: Schema = False) -> Node:
    """Return an object's schema with more names for any value, and a schema for all others."""
    new = dict(node)
    for keyword in KINDS:
        existing = new.get(keyword, {})
        added = [name for kind, name in names if kind == keyword and name not in existing]
        if added:
            new[keyword] = {**existing, **dict.fromkeys(added, True)}
    new["additionalProperties"] = rest
    return new


def _lists_any(node: Node) -> bool:
    """Say whether a schema itself lists properties, and leaves others undefined."""
    if "additionalProperties" in node:
        return False
    if any(isinstance(value, dict) for value in [*node.get("enum", ()), node.get("const")]):
        return False
    members = [*node.get("properties", {}).values(), *node.get("patternProperties", {}).values()]
    return any(member is not False for member in members)
