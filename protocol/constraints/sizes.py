"""Automaton sizes of a constraint: joined parts multiply, within one budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from .ranges import BOUNDS

MAX_STATES = 20_000  # of one automaton
MAX_ALL_STATES = 60_000
MAX_JOINED_PATTERNS = 8
MAX_PATTERN_PROPERTIES = 64
MAX_COPIED_SCHEMAS = 20_000
MAX_MERGED_MEMBERS = 50_000
# Product of the lengths of patterns at one place: the cost of a search step grows with it.
# An alternative to them is searched separately, at the cost of `_ALTERNATIVE_STEPS` steps.
MAX_PRODUCT = 3 * 10**7

ENDLESS = 10**30
_ALTERNATIVE_STEPS = 30
_MAX_MERGED_DEPTH = 100
# Keys of members without names: those of `patternProperties`, and all others.
PATTERNS, REST = -1, None
_UNNAMED = (PATTERNS, REST)


class TooLarge(ValueError):
    """A constraint whose automaton would be too large; `place` is a JSON pointer into a schema."""

    def __init__(self, words: str, place: str = "") -> None:
        super().__init__(words)
        self.place = place


Key = tuple[str, str | int | None]
"""Kind of member and its name; REST or PATTERNS for members without a name."""


@dataclass(frozen=True, slots=True)
class Size:
    """Upper bounds of the constraints on one value.

    `patterns` is their number, `chars` the product of their lengths, `states` those of the automata
    of multiples, `keys` the number of pattern properties, which are compared pairwise. `places`
    counts places with patterns or multiples, `alternatives` those of the value, `schemas` all.
    `members` have separate sizes; those of `ways` (a union) are merged when it is joined.
    """

    patterns: int = 0
    chars: int = 1
    states: int = 1
    keys: int = 0
    places: int = 0
    schemas: int = 0
    alternatives: int = 1
    members: Mapping[Key, Size] = field(default_factory=dict)
    ways: tuple[Size, ...] = ()

    @property
    def is_deep(self) -> bool:
        """Say whether members have sizes."""
        return bool(self.members or self.ways)

    @property
    def multiplies(self) -> bool:
        """Say whether joining it with other sizes may multiply them."""
        is_plain = (self.patterns, self.states, self.keys, self.alternatives) == (0, 1, 0, 1)
        return self.is_deep or not is_plain


def either(sizes: Sequence[Size]) -> Size:
    """Return the size of the union."""
    if len(sizes) < 2:
        return sizes[0] if sizes else Size()
    return Size(
        max(size.patterns for size in sizes),
        max(size.chars for size in sizes),
        max(size.states for size in sizes),
        max(size.keys for size in sizes),
        min(sum(size.places for size in sizes), ENDLESS),
        min(sum(size.schemas for size in sizes), ENDLESS),
        min(sum(size.alternatives for size in sizes), ENDLESS),
        ways=tuple({id(size): size for size in sizes if size.is_deep}.values()),
    )


class Budget:
    """Budget: totals over everything compiled for one output."""

    def __init__(self) -> None:
        self._states = 0
        self._product = 0
        self._copied = 0
        self._merged = 0
        self._counted: set[tuple[object, ...]] = set()

    def add_multiples(self, node: Mapping[str, Any], num_states: int, place: str) -> None:
        """Add the automaton of one schema's multiples; equal ones count once."""
        automaton = tuple(repr(node.get(name)) for name in ("multipleOf", "type", *BOUNDS))
        if automaton not in self._counted:
            self._counted.add(automaton)
            self.add_states(num_states, place)

    def add_states(self, num_states: int, place: str) -> None:
        """Add an automaton of multiples; raises `TooLarge` above the bounds."""
        self._states += num_states
        if num_states > MAX_STATES or self._states > MAX_ALL_STATES:
            is_one = num_states > MAX_STATES
            most = MAX_STATES if is_one else MAX_ALL_STATES
            raise TooLarge(
                f"makes {'an automaton' if is_one else 'automata'} of about"
                f" {min(num_states if is_one else self._states, ENDLESS):,} states, because"
                f" `multipleOf` needs one per remainder; the limit is {most:,}",
                place,
            )

    def add_copied(self, num_schemas: int, place: str) -> None:
        """Add the schemas copied for a reference; raises `TooLarge` above the bound."""
        self._copied += num_schemas
        if self._copied > MAX_COPIED_SCHEMAS:
            raise TooLarge(
                f"joins `$ref` with others, for which more than {MAX_COPIED_SCHEMAS:,} schemas"
                " are copied: too many",
                place,
            )

    def add_merged(self, num_members: int, place: str) -> None:
        """Add members of objects that are joined; raises `TooLarge` above the bound."""
        self._merged += num_members
        if self._merged > MAX_MERGED_MEMBERS:
            raise TooLarge(
                f"joins objects or arrays of more than {MAX_MERGED_MEMBERS:,} members: too many",
                place,
            )

    def add_joined(self, size: Size, place: str) -> None:
        """Add patterns joined at one place; raises `TooLarge` above the bounds."""
        if size.patterns > MAX_JOINED_PATTERNS:
            raise TooLarge(
                f"joins {size.patterns:,} patterns at one place; the limit is"
                f" {MAX_JOINED_PATTERNS}: combine them",
                place,
            )
        self._product += size.chars * size.places
        if size.alternatives > 1:
            self._product += size.chars * size.alternatives * _ALTERNATIVE_STEPS
        if self._product > MAX_PRODUCT:
            raise TooLarge(
                "joins patterns, or values with patterns, whose lengths multiply to more than"
                f" {MAX_PRODUCT:,}: shorten or combine them",
                place,
            )


@dataclass(frozen=True, slots=True)
class Joining:
    """Joins sizes at one place of a schema, and adds the cost to the budget."""

    budget: Budget
    place: str

    def joined(self, sizes: Iterable[Size], depth: int = 0) -> Size:
        """Return the size of the intersection, with members joined by name."""
        parts = [size for size in sizes if size.multiplies]
        if len(parts) < 2:
            return parts[0] if parts else Size()
        deep = [size for size in parts if size.is_deep]
        size = Size(
            sum(part.patterns for part in parts),
            _product(part.chars for part in parts),
            _product(part.states for part in parts),
            sum(part.keys for part in parts),
            max(part.places for part in parts),
            alternatives=_product(part.alternatives for part in parts),
            members=self._members(deep, depth) if len(deep) > 1 else {},
            ways=tuple(deep) if len(deep) == 1 else (),
        )
        check_keys(size.keys, self.place)
        if size.patterns and sum(part.patterns > 0 or part.alternatives > 1 for part in parts) > 1:
            self.budget.add_joined(size, self.place)
        if sum(part.states > 1 for part in parts) > 1:
            self.budget.add_states(size.states * size.places, self.place)
        return size

    def _members(self, sizes: Sequence[Size], depth: int) -> dict[Key, Size]:
        """Return the members of the intersection.

        A name that one size does not list belongs to its REST or to its PATTERNS.
        """
        if depth > _MAX_MERGED_DEPTH:
            words = f"joins schemas nested more than {_MAX_MERGED_DEPTH} levels deep"
            raise TooLarge(words, self.place)
        parts = [self._listed(size) for size in sizes]
        by_key: dict[Key, list[Size]] = {}
        for part in parts:
            for key, size in part.items():
                by_key.setdefault(key, []).append(size)
        rests = [part for part in parts if any(name in _UNNAMED for _, name in part)]
        for (kind, name), members in by_key.items():
            self.budget.add_merged(len(members) + len(rests), self.place)
            if name is not REST:
                members += [
                    part[kind, REST]
                    for part in rests
                    if (kind, name) not in part and (kind, REST) in part
                ]
            if name not in _UNNAMED:
                members += [part[kind, PATTERNS] for part in rests if (kind, PATTERNS) in part]
        return {key: self.joined(members, depth + 1) for key, members in by_key.items()}

    def _listed(self, size: Size) -> Mapping[Key, Size]:
        """Return the members of a size, those of its ways merged."""
        if not size.ways:
            return size.members
        by_key: dict[Key, list[Size]] = {}
        waiting, seen = [size], {id(size)}
        while waiting:
            way = waiting.pop()
            self.budget.add_merged(1 + len(way.members), self.place)
            for key, member in way.members.items():
                by_key.setdefault(key, []).append(member)
            waiting += [one for one in way.ways if id(one) not in seen]
            seen.update(map(id, way.ways))
        return {key: either(members) for key, members in by_key.items()}


def check_keys(num_keys: int, place: str) -> None:
    """Raise `TooLarge` for too many pattern properties, which are compared pairwise."""
    if num_keys > MAX_PATTERN_PROPERTIES:
        raise TooLarge(
            f"joins {num_keys:,} `patternProperties` at one place; the limit is"
            f" {MAX_PATTERN_PROPERTIES}",
            place,
        )


def _product(numbers: Iterable[int]) -> int:
    return reduce(lambda one, other: min(one * other, ENDLESS), numbers, 1)
