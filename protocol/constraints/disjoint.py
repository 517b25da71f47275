"""Disjointness of JSON schemas: proves that no value satisfies two schemas of a `oneOf`.

`oneOf` is then equivalent to `anyOf`, which is all that a grammar can express. A pair is disjoint
by types, by values, by bounds, or by a required member: a discriminator. If requiring or excluding
a member is enough to make schemas disjoint, they are narrowed that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, islice
from typing import Any

from .schema_facts import MAX_WORK, Fact, Facts, Schema, SchemaFacts

_MAX_DEPTH = 4  # nested members
_FEW_PAIRS = 100
_OF_PLACES = frozenset(["$defs", "definitions", "$schema", "$id", "id", "$anchor"])

# ID of a schema, and the names of members that it requires and excludes.
_Narrowing = tuple[int, tuple[str | int, ...], tuple[str | int, ...]]


class Overlap(Exception):
    """Overlap of two schemas of a `oneOf`, by their indices."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)
        self.first = first
        self.second = second


class Disjointness:
    """Compares schemas within a `root`; without `resolves` no reference is followed."""

    def __init__(self, root: dict[str, Any], *, resolves: bool = True) -> None:
        self._root = root
        self._facts = SchemaFacts(root, resolves=resolves)
        self._copies: dict[_Narrowing, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._names: dict[int, str] = {}

    @property
    def is_exhausted(self) -> bool:
        """Say whether the work limit is reached; nothing more is proved after that."""
        return self._facts.is_exhausted

    def disjoint(self, schema: Mapping[str, Any]) -> list[Schema]:
        """Return the schemas of a `oneOf` if all are disjoint; otherwise raise `Overlap`.

        If narrowing makes them disjoint, narrowed copies are returned. An optional discriminator,
        such as one with a default, is required of each; schemas that require different members
        exclude each other's.
        """
        found: list[Schema] = schema["oneOf"]
        siblings = {
            key: value for key, value in schema.items() if key not in {*_OF_PLACES, "oneOf"}
        }
        ways = [{"allOf": [siblings, way]} for way in found] if siblings else found
        facts = [self._facts.infer(way) for way in ways]
        if len(ways) == 1 or self._discriminator(facts, is_required=True) is not None:
            return found
        left = self._overlapping(ways, depths=2)
        if not left:
            return found
        name = self._discriminator(facts, is_required=False)
        if name is not None:
            return [self._narrowed(way, (name,), ()) for way in found]
        absent = self._parted(ways)
        return [
            self._narrowed(way, (), tuple(dict.fromkeys(names))) if names else way
            for way, names in zip(found, absent, strict=True)
        ]

    def fill(self) -> None:
        """Fill in the narrowed copies."""
        for (_, required, absent), (model, copy) in self._copies.items():
            copy.update((key, value) for key, value in model.items() if key not in _OF_PLACES)
            if required:
                copy["required"] = [*dict.fromkeys([*model.get("required", ()), *required])]
            if absent:
                copy["properties"] = model.get("properties", {}) | dict.fromkeys(absent, False)

    def _narrowed(
        self, way: Schema, required: tuple[str | int, ...], absent: tuple[str | int, ...]
    ) -> Schema:
        """Return a copy of a schema, filled later, or a reference to a copy of its target.

        A reference with sibling keywords would recurse without end if it refers to itself.
        """
        while isinstance(way, dict) and way.keys() == {"allOf"} and len(way["allOf"]) == 1:
            [way] = way["allOf"]
        leads = isinstance(way, dict) and way.keys() == {"$ref"}
        model = self._facts.target(way["$ref"]) if leads else way
        if not isinstance(model, dict):
            return way if model is False else self._narrowed({}, required, absent)
        _, copy = self._copies.setdefault((id(model), required, absent), (model, {}))
        if not leads:
            return copy
        defs = self._root.setdefault("$defs", {})
        if id(copy) not in self._names:
            name = f"disjoint-{len(defs)}"
            while name in defs:
                name += "-"
            self._names[id(copy)] = name
            defs[name] = copy
        return {"$ref": f"#/$defs/{self._names[id(copy)]}"}

    def _overlapping(self, ways: Sequence[Schema], depths: int) -> list[tuple[int, int]]:
        """Return the pairs that are not proved disjoint; for very many schemas, all pairs."""
        left = list(islice(combinations(range(len(ways)), 2), MAX_WORK))
        if depths < _MAX_DEPTH and len(left) > _FEW_PAIRS:
            return left
        self._facts.work += len(left) // 4
        for depth in range(depths):
            left = [(i, j) for i, j in left if not self._are_apart(ways[i], ways[j], depth)]
        return left

    def _parted(self, ways: Sequence[Schema]) -> list[list[str | int]]:
        """Return the members that each schema must exclude for all to be disjoint.

        Raises `Overlap` for the first pair that cannot be made disjoint.
        """
        absent: list[list[str | int]] = [[] for _ in ways]
        if len(ways) ** 2 > MAX_WORK:
            self._facts.work += MAX_WORK
            raise Overlap(0, 1)
        for i, j in self._overlapping(ways, _MAX_DEPTH):
            names = self._parting(self._facts.infer(ways[i]), self._facts.infer(ways[j]))
            if names is None:
                raise Overlap(i, j)
            absent[i].append(names[0])
            absent[j].append(names[1])
        return absent

    def _parting(self, one: Facts, other: Facts) -> tuple[str | int, str | int] | None:
        """Return a member for each to exclude, which the other requires; None if there is none."""
        kinds = [kind for kind in one if kind in other and kind != "object"]
        if "object" not in one or "object" not in other:
            return None
        if not all(self._exclude(one[kind], other[kind], _MAX_DEPTH) for kind in kinds):
            return None
        first, second = one["object"], other["object"]
        self._facts.work += (len(first.required) + len(second.required)) // 8
        if self.is_exhausted:
            return None
        without_one = _foreign(first, second)
        without_other = _foreign(second, first)
        if without_one is None or without_other is None:
            return None
        return without_one, without_other

    def _discriminator(self, ways: Sequence[Facts], *, is_required: bool) -> str | int | None:
        """Return a member that discriminates all schemas; takes linear time."""
        first = next((way["object"] for way in ways if "object" in way), None)
        if first is None:
            return None
        if not is_required and sum("object" in way for way in ways) < 2:
            return None
        names = [name for name in first.members if not is_required or name in first.required]
        return next(
            (name for name in names if self._tells_apart(name, ways, is_required=is_required)), None
        )

    def _tells_apart(self, name: str | int, ways: Sequence[Facts], *, is_required: bool) -> bool:
        seen: set[object] = set()
        for way in ways:
            self._facts.work += 1
            signs: set[object] = {kind for kind in way if kind != "object"}
            if fact := way.get("object"):
                is_there = name in (fact.required if is_required else fact.members)
                values = self._values_of(fact.member(name)) if is_there else None
                if values is None or not (values or is_required):
                    return False
                signs |= values
            if not seen.isdisjoint(signs):
                return False
            seen |= signs
        return not self.is_exhausted

    def _values_of(self, member: Schema) -> set[object] | None:
        """Return all scalars that a member can be, each with its type; None if unbounded."""
        values: set[object] = set()
        for kind, fact in self._facts.infer(member).items():
            if fact.values is None:
                return None
            self._facts.work += len(fact.values) // 16
            values |= {(kind, value) for value in fact.values}
        return values

    def _are_apart(self, one: Schema, other: Schema, depth: int) -> bool:
        """Say whether two schemas are proved disjoint by members up to `depth` levels deep."""
        self._facts.work += 1
        first, second = self._facts.infer(one), self._facts.infer(other)
        if self.is_exhausted:
            return False
        return all(
            self._exclude(first[kind], second[kind], depth) for kind in first if kind in second
        )

    def _exclude(self, one: Fact, other: Fact, depth: int) -> bool:
        if one.values is not None and other.values is not None:
            self._facts.work += min(len(one.values), len(other.values)) // 16
            if one.values.isdisjoint(other.values):
                return True
        if _is_above(one, other) or _is_above(other, one):
            return True
        if depth == 0:
            return False
        required = one.required | other.required
        listed = dict.fromkeys([*one.members, *other.members, *sorted(required, key=str)])
        self._facts.work += len(listed) // 16
        names = [name for name in listed if name in required]
        return any(
            self._are_apart(one.member(name), other.member(name), depth - 1) for name in names
        )


def _foreign(one: Fact, other: Fact) -> str | int | None:
    """Return a member that only the other requires, preferably one that this one does not list."""
    names = sorted(other.required - one.required, key=lambda name: (name in one.members, str(name)))
    return next(iter(names), None)


def _is_above(one: Fact, other: Fact) -> bool:
    """Say whether all numbers, lengths or counts of one are above all of the other."""
    if one.low is None or other.high is None:
        return False
    (low, is_open), (high, is_closed) = one.low, other.high
    return low > high or (low == high and bool(is_open or is_closed))
