"""Bounds on the automata that a constraint is compiled to: what would be too large is refused.

An automaton for `multipleOf: n` has about n states, and constraints that hold at one place, as
`allOf` makes them, multiply theirs. Compilation searches such products without a bound of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import reduce
from typing import Any

MAX_STATES = 20_000
MAX_JOINED_PATTERNS = 8
MAX_PATTERN_PROPERTIES = 64
MAX_COPIED_SCHEMAS = 20_000
# Of the lengths of patterns that hold at one place: what a step of the search takes grows with it.
# An alternative beside them is searched by itself, which takes as long as so many steps.
MAX_PRODUCT = 3 * 10**7

MULTIPLYING = frozenset(["multipleOf", "pattern", "format", "patternProperties", "$ref"])
"""Keywords without one of which no schema is too large."""

_ALTERNATIVE_STEPS = 30
_FORMAT_CHARS = 50
_ENDLESS = 10**30
_CHOICES = ("anyOf", "oneOf")
_CHILDREN = ("items", "additionalProperties", "additionalItems")
_LISTS_OF_CHILDREN = ("prefixItems", "items")
_NAMED_CHILDREN = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")

# Lark: a rule begins a line; what stands in quotes, between slashes or in a comment is no operator.
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w.-]*)(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_LARK_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(?P<join>&)|(?P<name>[A-Za-z_][\w.-]*)'
)
_JSON = re.compile(r"%json\s*(?=\{)")


class TooLarge(ValueError):
    """A constraint whose automaton would be too large; `place` is a JSON pointer into a schema."""

    def __init__(self, words: str, place: str = "") -> None:
        super().__init__(words)
        self.place = place


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise `TooLarge` for a schema, as `served_schema` returns it, that is too large to compile.

    Takes time linear in the schema.
    """
    _Schema(schema, _Budget()).check()


def check_grammar(source: str) -> None:
    """Raise `TooLarge` for a Lark grammar whose terms, or the schemas in it, are too large.

    One in another form has neither.
    """
    budget = _Budget()
    for found in _JSON.finditer(source):
        try:
            schema, _ = json.JSONDecoder().raw_decode(source, found.end())
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong with it
        _Schema(schema, budget).check()
    if "&" in source:
        _check_joined_terms(source)


@dataclass(frozen=True, slots=True)
class _Size:
    """Sizes of what may hold at one place of a schema, at most.

    So many `patterns`, whose lengths multiply to `chars`; multiples whose automata have `states`
    together; so many `keys` that are patterns, each compared with each. There are `places` with
    patterns or multiples, and in all `schemas`; of one value there are `alternatives`.
    """

    patterns: int = 0
    chars: int = 1
    states: int = 1
    keys: int = 0
    places: int = 0
    schemas: int = 0
    alternatives: int = 1

    def joined(self, other: _Size) -> _Size:
        """Return the size where both hold at once."""
        return _Size(
            self.patterns + other.patterns,
            min(self.chars * other.chars, _ENDLESS),
            min(self.states * other.states, _ENDLESS),
            self.keys + other.keys,
            max(self.places, other.places),
            min(self.schemas + other.schemas, _ENDLESS),
            min(self.alternatives * other.alternatives, _ENDLESS),
        )


def _either(sizes: Iterable[_Size]) -> _Size:
    """Return the size where each holds somewhere else."""
    return reduce(
        lambda one, other: _Size(
            max(one.patterns, other.patterns),
            max(one.chars, other.chars),
            max(one.states, other.states),
            max(one.keys, other.keys),
            one.places + other.places,
            min(one.schemas + other.schemas, _ENDLESS),
            max(one.alternatives, other.alternatives),
        ),
        sizes,
        _Size(),
    )


class _Budget:
    """Sums over all that is compiled for one output."""

    def __init__(self) -> None:
        self._states = 0
        self._product = 0
        self._copied = 0

    def add_states(self, num_states: int, place: str) -> None:
        """Add an automaton of multiples; raises `TooLarge` above the bound."""
        self._states += num_states
        if self._states > MAX_STATES:
            raise TooLarge(
                f"makes an automaton of about {min(self._states, _ENDLESS):,} states, as"
                f" `multipleOf` takes one for each remainder; at most {MAX_STATES:,} are served",
                place,
            )

    def add_copied(self, num_schemas: int, place: str) -> None:
        """Add what a reference is replaced by; raises `TooLarge` above the bound."""
        self._copied += num_schemas
        if self._copied > MAX_COPIED_SCHEMAS:
            raise TooLarge(
                f"joins `$ref` with others, for which more than {MAX_COPIED_SCHEMAS:,} schemas"
                " are copied: too many",
                place,
            )

    def add_joined(self, size: _Size, place: str) -> None:
        """Add patterns that hold at once; raises `TooLarge` above the bounds."""
        if size.patterns > MAX_JOINED_PATTERNS:
            raise TooLarge(
                f"joins {size.patterns:,} patterns at one place; at most"
                f" {MAX_JOINED_PATTERNS} are served: write them as one",
                place,
            )
        self._product += size.chars * size.places
        if size.alternatives > 1:
            self._product += size.chars * size.alternatives * _ALTERNATIVE_STEPS
        if self._product > MAX_PRODUCT:
            raise TooLarge(
                "joins patterns, or values with patterns, whose lengths multiply to more than"
                f" {MAX_PRODUCT:,}: shorten them, or write them as one",
                place,
            )


class _Schema:
    """One schema, gone through once; definitions before those that refer to them."""

    def __init__(self, root: Mapping[str, Any], budget: _Budget) -> None:
        self._root = root
        self._budget = budget
        self._by_anchor = {
            f"#{node['$anchor']}": node
            for node in _nodes(root)
            if isinstance(node.get("$anchor"), str)
        }
        self._sizes: dict[str, _Size] = {}  # by reference
        self._counted: set[int] = set()  # places in definitions, which several may refer to

    def check(self) -> None:
        """Raise `TooLarge` if it is."""
        for reference, target in self._targets():
            self._sizes[reference] = self._size(target, reference.removeprefix("#"))
        self._size(self._root, "")

    def _targets(self) -> Iterator[tuple[str, Any]]:
        """Yield what is referred to, each behind what it refers to itself, if that is no circle."""
        seen: set[str] = set()
        waiting = [(reference, False) for reference in _references(self._root)]
        while waiting:
            reference, is_ready = waiting.pop()
            if is_ready:
                yield reference, self._target(reference)
            elif reference not in seen:
                seen.add(reference)
                waiting.append((reference, True))
                inside = _references(self._target(reference))
                waiting.extend((one, False) for one in inside if one not in seen)

    def _target(self, reference: str) -> Any:
        if reference in self._by_anchor:
            return self._by_anchor[reference]
        node: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                node = node[int(key)] if key.isdigit() and int(key) < len(node) else None
            else:
                node = node.get(key) if isinstance(node, dict) else None
        return node

    def _size(self, node: Any, place: str) -> _Size:
        """Return the size of what holds where a schema does, and count what it takes."""
        if not isinstance(node, dict):
            return _Size()
        if "$ref" in node and len(node) == 1:
            return replace(self._referred(node), schemas=1)
        is_new = id(node) not in self._counted
        self._counted.add(id(node))
        own = self._own(node, place, is_new=is_new)
        size = inside = _either([own, *self._children(node, place)])
        for joined in self._beside(node, place, is_new=is_new):
            size = size.joined(joined)
        if size.keys > MAX_PATTERN_PROPERTIES:
            raise TooLarge(
                f"joins {size.keys:,} `patternProperties` at one place; at most"
                f" {MAX_PATTERN_PROPERTIES} are served",
                place,
            )
        are_joined = size.patterns > inside.patterns or size.alternatives > inside.alternatives
        is_joined = own.patterns > 1 or (own.patterns and own.alternatives > 1)
        if is_new and size.patterns and (are_joined or is_joined):
            self._budget.add_joined(size, place)
        if is_new and size.states > inside.states:
            self._budget.add_states(size.states * size.places, place)
        return size

    def _own(self, node: dict[str, Any], place: str, *, is_new: bool) -> _Size:
        size = _Size(schemas=1)
        if isinstance(pattern := node.get("pattern"), str):
            size = size.joined(_Size(1, max(2, len(pattern)), places=1))
        if "format" in node:
            size = size.joined(_Size(1, _FORMAT_CHARS, places=1))
        if (step := node.get("multipleOf")) is not None:
            states = _num_states(step)
            if is_new:
                self._budget.add_states(states, f"{place}/multipleOf")
            size = size.joined(_Size(states=states, places=1))
        if isinstance(values := node.get("enum"), list):
            size = size.joined(_Size(alternatives=max(1, len(values))))
        if isinstance(keys := node.get("patternProperties"), dict):
            size = size.joined(_Size(keys=len(keys)))
        return size

    def _children(self, node: dict[str, Any], place: str) -> Iterator[_Size]:
        for name in _CHILDREN:
            yield self._size(node.get(name), f"{place}/{name}")
        for name in _LISTS_OF_CHILDREN:
            if isinstance(values := node.get(name), list):
                yield from (self._size(one, f"{place}/{name}/{i}") for i, one in enumerate(values))
        for name in (*_NAMED_CHILDREN, *_DEFINITIONS):
            if isinstance(named := node.get(name), dict):
                sizes = [self._size(one, f"{place}/{name}/{key}") for key, one in named.items()]
                if name in _NAMED_CHILDREN:
                    yield from sizes

    def _beside(self, node: dict[str, Any], place: str, *, is_new: bool) -> Iterator[_Size]:
        """Yield the sizes of what holds at the same place."""

        def joined(one: Any, at: str) -> _Size:
            if not (isinstance(one, dict) and "$ref" in one):
                return self._size(one, at)
            if is_new:
                self._budget.add_copied(self._referred(one).schemas, at)
            return self._referred(one) if len(one) == 1 else self._size(one, at)

        if isinstance(values := node.get("allOf"), list):
            yield from (joined(one, f"{place}/allOf/{i}") for i, one in enumerate(values))
        for name in _CHOICES:
            if isinstance(values := node.get(name), list):
                size_of = joined if len(node) > 1 else self._size
                sizes = [size_of(one, f"{place}/{name}/{i}") for i, one in enumerate(values)]
                number = sum(size.alternatives for size in sizes)
                yield replace(_either(sizes), alternatives=max(1, min(number, _ENDLESS)))
        if "$ref" in node:
            if is_new:
                self._budget.add_copied(self._referred(node).schemas, place)
            yield self._referred(node)

    def _referred(self, node: dict[str, Any]) -> _Size:
        return self._sizes.get(node["$ref"], _Size())


def _num_states(step: float) -> int:
    """Return about how many states multiples of a number take: few where it is a round one."""
    digits = Decimal(repr(step)).normalize().as_tuple()
    coefficient = int("".join(map(str, digits.digits)) or "0")
    exponent = digits.exponent if isinstance(digits.exponent, int) else 0
    rounded = coefficient if exponent <= 0 else min(coefficient * 16, coefficient * 10**exponent)
    return max(1, min(rounded, _ENDLESS))


def _nodes(root: Any) -> Iterator[dict[str, Any]]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _references(root: Any) -> list[str]:
    return [node["$ref"] for node in _nodes(root) if isinstance(node.get("$ref"), str)]


def _check_joined_terms(source: str) -> None:
    """Raise `TooLarge` for a term that joins others by `&` beyond the bound."""
    bodies = _bodies(source)
    sizes: dict[str, int] = {}
    for name in _ordered(bodies):
        text, names, num_joins = bodies[name]
        size = len(text) + sum(sizes.get(one, 0) for one in names)
        sizes[name] = min(size ** min(num_joins + 1, 64), _ENDLESS)
        if num_joins > 0 and sizes[name] > MAX_PRODUCT:
            raise TooLarge(
                f"`{name}` joins terms by `&` whose lengths multiply to more than"
                f" {MAX_PRODUCT:,}: shorten them, or join fewer"
            )


def _bodies(source: str) -> dict[str, tuple[str, set[str], int]]:
    """Return the text of each rule, the names in it, and how many joins."""
    rules = [*_RULE.finditer(source)]
    stops = [*(rule.start() for rule in rules[1:]), len(source)]
    bodies = {}
    for rule, stop in zip(rules, stops, strict=True):
        text = source[rule.end() : stop]
        tokens = [*_LARK_TOKEN.finditer(text)]
        names = {token["name"] for token in tokens if token["name"]}
        bodies[rule[1]] = (text, names, sum(token["join"] is not None for token in tokens))
    return bodies


def _ordered(bodies: Mapping[str, tuple[str, set[str], int]]) -> Iterator[str]:
    """Yield the names of terms, each behind those in it; rules, which no term holds, are none."""
    seen: set[str] = set()
    waiting = [(name, False) for name in bodies if name.isupper() or bodies[name][2]]
    while waiting:
        name, is_ready = waiting.pop()
        if is_ready:
            yield name
        elif name not in seen:
            seen.add(name)
            waiting.append((name, True))
            waiting.extend(
                (one, False) for one in bodies[name][1] if one in bodies and one.isupper()
            )
