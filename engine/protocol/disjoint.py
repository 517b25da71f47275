"""Disjointness of JSON schemas: shows of `oneOf` that no value satisfies two of its schemas.

Then `oneOf` means what `anyOf` does, which is all that a grammar can say. A pair is disjoint by
types, by values, by bounds, or by a member that each of its values has: a discriminator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from engine.protocol.schema_facts import MAX_WORK, Fact, Facts, Schema, SchemaFacts

_MAX_DEPTH = 4  # members in members
_NO_CONSTRAINTS = frozenset(["oneOf", "$defs", "definitions", "$schema", "$id", "id", "$anchor"])


class Overlap(Exception):
    """The numbers of two schemas of a `oneOf` that a value may both satisfy."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)
        self.first = first
        self.second = second


class Disjointness:
    """Compares schemas that lie in a `root`; without `resolves` no reference is followed."""

    def __init__(self, root: Schema, *, resolves: bool = True) -> None:
        self._facts = SchemaFacts(root, resolves=resolves)

    @property
    def is_exhausted(self) -> bool:
        """Say whether there was too much to compare: then nothing more is shown."""
        return self._facts.is_exhausted

    def disjoint(self, schema: Mapping[str, Any]) -> list[Schema]:
        """Return the schemas of a `oneOf` where all of them are disjoint; else raise `Overlap`.

        Where they are not, they are narrowed so that no value of one satisfies another. A
        discriminator that may be left out, as those with a default may, is required of each; and
        of those that require different members, none has what another requires.
        """
        found: list[Schema] = schema["oneOf"]
        beside = {key: value for key, value in schema.items() if key not in _NO_CONSTRAINTS}
        ways = [{"allOf": [beside, way]} for way in found] if beside else found
        facts = [self._facts.of(way) for way in ways]
        if len(ways) == 1 or self._discriminator(facts, is_required=True) is not None:
            return found
        name = self._discriminator(facts, is_required=False)
        if name is not None:
            return [{"allOf": [way, {"required": [name]}]} for way in found]
        absent = self._compare(ways)
        return [
            {"allOf": [way, {"properties": dict.fromkeys(names, False)}]} if names else way
            for way, names in zip(found, absent, strict=True)
        ]

    def _compare(self, ways: Sequence[Schema]) -> list[list[str | int]]:
        """Compare each with each, and return what each must not have so that they are disjoint.

        Raises `Overlap` for the first two that cannot be made so.
        """
        num_pairs = len(ways) * (len(ways) - 1) // 2
        self._facts.work += num_pairs // 4
        if self.is_exhausted or num_pairs > MAX_WORK:
            raise Overlap(0, 1)
        left = list(combinations(range(len(ways)), 2))
        for depth in range(_MAX_DEPTH):
            left = [(i, j) for i, j in left if not self._are_apart(ways[i], ways[j], depth)]
        absent: list[list[str | int]] = [[] for _ in ways]
        for i, j in left:
            names = self._parting(self._facts.of(ways[i]), self._facts.of(ways[j]))
            if names is None:
                raise Overlap(i, j)
            absent[i].append(names[0])
            absent[j].append(names[1])
        return absent

    def _parting(self, one: Facts, other: Facts) -> tuple[str | int, str | int] | None:
        """Return a member that each must not have, since the other has it: else they are one."""
        kinds = [kind for kind in one if kind in other and kind != "object"]
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
        """Return a member that tells all of them apart; takes no longer than they are many."""
        first = next((way["object"] for way in ways if "object" in way), None)
        if first is None:
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
                if values is None:
                    return False
                signs |= values
            if not seen.isdisjoint(signs):
                return False
            seen |= signs
        return not self.is_exhausted

    def _values_of(self, member: Schema) -> set[object] | None:
        """Return all scalars that a member can be, each with its type; None where it is others."""
        found: set[object] = set()
        for kind, fact in self._facts.of(member).items():
            if fact.values is None:
                return None
            self._facts.work += len(fact.values) // 16
            found |= {(kind, value) for value in fact.values}
        return found

    def _are_apart(self, one: Schema, other: Schema, depth: int) -> bool:
        """Say whether no value satisfies both, as far as members in `depth` members show."""
        self._facts.work += 1
        first, second = self._facts.of(one), self._facts.of(other)
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
        if _lies_above(one, other) or _lies_above(other, one):
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
    """Return a member that only the other requires: if it can be, one that this does not list."""
    names = sorted(other.required - one.required, key=lambda name: (name in one.members, str(name)))
    return next(iter(names), None)


def _lies_above(one: Fact, other: Fact) -> bool:
    """Say whether each number, length or count of one is above each of the other."""
    if one.low is None or other.high is None:
        return False
    (low, is_open), (high, is_closed) = one.low, other.high
    return low > high or (low == high and bool(is_open or is_closed))
