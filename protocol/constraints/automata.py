"""Automaton limits: constraints that would compile to automata that are too large are refused.

An automaton for `multipleOf: n` has about n states, and constraints joined at one place, as by
`allOf`, multiply their states. Compilation itself searches such products without a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from math import prod
from typing import Any

from .formats import NARROWER
from .schema_facts import resolved
from .sizes import (
    ENDLESS,
    MAX_PRODUCT,
    PATTERNS,
    REST,
    Budget,
    Joining,
    Key,
    Size,
    TooLarge,
    check_keys,
    either,
)

MULTIPLYING = frozenset(["multipleOf", "pattern", "format", "patternProperties", "$ref"])
"""A schema must have at least one of these keywords to be too large."""

_FORMAT_CHARS = 50
_CHOICES = ("anyOf", "oneOf")
# Keywords of members without names, and the kind of each.
_CHILDREN = {"items": "items", "additionalItems": "items", "additionalProperties": "properties"}
_LISTS_OF_CHILDREN = ("prefixItems", "items")
_NAMED_CHILDREN = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")

# Lark: a rule starts a line; quoted text, regexes and comments contain no operators.
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w.-]*)(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_LARK_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(?P<join>&)|(?P<name>[A-Za-z_][\w.-]*)'
)
_JSON = re.compile(r"%json\s*(?=\{)")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise `TooLarge` for a schema, as returned by `served_schema`, that is too large to compile.

    The time is linear in the schema and in the members of joined objects, which are bounded.
    """
    _Schema(schema, Budget()).check()


def check_grammar(source: str) -> None:
    """Raise `TooLarge` for a Lark grammar whose terms, or the schemas in it, are too large.

    A GBNF grammar has neither, because `&` is an ordinary character in it.
    """
    budget = Budget()
    for match in _JSON.finditer(source):
        try:
            schema, _ = json.JSONDecoder().raw_decode(source, match.end())
        except (ValueError, RecursionError):
            continue  # the compiler reports the error
        _Schema(schema, budget).check()
    if "&" in source and "::=" not in source:
        _check_joined_terms(source)


def check_joined(patterns: Sequence[str]) -> None:
    """Raise `TooLarge` for plain patterns, joined by `&`, that are too large to compile."""
    if len(patterns) > 1:
        size = Size(len(patterns), prod(max(2, len(each)) for each in patterns), places=1)
        Budget().add_joined(size, "")


class _Schema:
    """Size check of one schema, in one pass; definitions before references to them."""

    def __init__(self, root: Mapping[str, Any], budget: Budget) -> None:
        self._root = root
        self._budget = budget
        self._by_reference = {
            f"#{node['$anchor']}": node
            for node in _nodes(root)
            if isinstance(node.get("$anchor"), str)
        }
        self._sizes: dict[int, Size] = {}  # by the identity of a schema

    def check(self) -> None:
        """Raise `TooLarge` if the schema is too large."""
        for reference, target in self._targets():
            self._size(target, reference.removeprefix("#"))
        self._size(self._root, "")

    def _targets(self) -> Iterator[tuple[str, Any]]:
        """Yield the targets of references in topological order; cycles are cut."""
        seen: set[int] = set()
        waiting = [(reference, False) for reference in _references(self._root)]
        while waiting:
            reference, is_ready = waiting.pop()
            target = self._target(reference)
            if is_ready:
                yield reference, target
            elif id(target) not in seen:
                seen.add(id(target))
                waiting.append((reference, True))
                waiting.extend((one, False) for one in _references(target))

    def _target(self, reference: str) -> Any:
        if reference not in self._by_reference:
            self._by_reference[reference] = resolved(self._root, reference)
        return self._by_reference[reference]

    def _size(self, node: Any, place: str) -> Size:
        """Return the size of a schema with all constraints on the same value; memoised."""
        if not isinstance(node, dict):
            return Size()
        if isinstance(node.get("$ref"), str) and len(node) == 1:
            return replace(self._referred(node), schemas=1)
        if id(node) not in self._sizes:
            joining = Joining(self._budget, place)
            children = self._children(node, place)
            parts = [*self._own(node, place), *children, *self._joined_schemas(node, place)]
            num_schemas = 1 + sum(part.schemas for part in parts)
            size = replace(joining.joined(parts), schemas=min(num_schemas, ENDLESS))
            self._sizes[id(node)] = size
        return self._sizes[id(node)]

    def _own(self, node: dict[str, Any], place: str) -> Iterator[Size]:
        """Yield the sizes of a schema's own keywords."""
        if isinstance(pattern := node.get("pattern"), str):
            yield Size(1, max(2, len(pattern)), places=1)
        if "format" in node:
            yield Size(1, _FORMAT_CHARS, places=1)
        step = node.get("multipleOf")
        if isinstance(step, int | float) and not isinstance(step, bool):
            states = _num_states(step)
            self._budget.add_multiples(node, states, f"{place}/multipleOf")
            yield Size(states=states, places=1)
        if isinstance(values := node.get("enum"), list):
            yield Size(alternatives=max(1, len(values)))
        if isinstance(keys := node.get("patternProperties"), dict):
            check_keys(len(keys), place)
            yield Size(keys=len(keys))

    def _children(self, node: dict[str, Any], place: str) -> Iterator[Size]:
        """Yield one size with those of all members; it also counts the definitions' schemas."""
        members: dict[Key, list[Size]] = {}
        num_schemas = 0

        def add(key: Key | None, child: Any, at: str) -> None:
            nonlocal num_schemas
            size = self._size(child, f"{place}/{at}")
            num_schemas += size.schemas if key else 0
            if key and isinstance(child, dict):
                members.setdefault(key, []).append(size)

        for name, kind in _CHILDREN.items():
            add((kind, REST), node.get(name), name)
        for name in _LISTS_OF_CHILDREN:
            if isinstance(values := node.get(name), list):
                for i, one in enumerate(values):
                    add(("items", i), one, f"{name}/{i}")
        for name in (*_NAMED_CHILDREN, *_DEFINITIONS):
            if isinstance(named := node.get(name), dict):
                for key, one in named.items():
                    member = key if name == "properties" else PATTERNS
                    is_member = name in _NAMED_CHILDREN
                    add(("properties", member) if is_member else None, one, f"{name}/{key}")
        sizes = {key: either(found) for key, found in members.items()}
        yield Size(schemas=min(num_schemas, ENDLESS), members=self._fitted(sizes, place))

    def _fitted(self, members: Mapping[Key, Size], place: str) -> Mapping[Key, Size]:
        """Return the members of an object; listed names may also match its patterns."""
        patterns = members.get(("properties", PATTERNS))
        if patterns is None:
            return members
        joining = Joining(self._budget, place)
        return {
            key: joining.joined([size, patterns]) if isinstance(key[1], str) else size
            for key, size in members.items()
        }

    def _joined_schemas(self, node: dict[str, Any], place: str) -> Iterator[Size]:
        """Yield the sizes of subschemas of the same value: `allOf`, choices and `$ref`."""

        def joined(one: Any, at: str) -> Size:
            if not (isinstance(one, dict) and isinstance(one.get("$ref"), str)):
                return self._size(one, at)
            self._budget.add_copied(self._referred(one).schemas, at)
            return self._referred(one) if len(one) == 1 else self._size(one, at)

        if isinstance(values := node.get("allOf"), list):
            narrower = {"pattern": NARROWER.get(str(node.get("format")))}
            for i, one in enumerate(values):
                if one != narrower:  # added for its own format, which is already counted
                    yield joined(one, f"{place}/allOf/{i}")
        for name in _CHOICES:
            if isinstance(values := node.get(name), list):
                size_of = joined if len(node) > 1 else self._size
                yield either([size_of(one, f"{place}/{name}/{i}") for i, one in enumerate(values)])
        if isinstance(node.get("$ref"), str):
            self._budget.add_copied(self._referred(node).schemas, place)
            yield self._referred(node)

    def _referred(self, node: dict[str, Any]) -> Size:
        return self._sizes.get(id(self._target(node["$ref"])), Size())


def _num_states(step: float) -> int:
    """Return the approximate number of states for multiples of a number: few for a round number."""
    digits = Decimal(repr(step)).normalize().as_tuple()
    coefficient = int("".join(map(str, digits.digits)) or "0")
    exponent = digits.exponent if isinstance(digits.exponent, int) else 0
    rounded = coefficient if exponent <= 0 else min(coefficient * 16, coefficient * 10**exponent)
    return max(1, min(rounded, ENDLESS))


def _nodes(root: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and its subschemas, skipping values that are not schemas."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in (*_CHILDREN, "prefixItems", *_CHOICES, "allOf"):
            value = node.get(name)
            waiting.extend(value if isinstance(value, list) else [value])
        for name in (*_NAMED_CHILDREN, *_DEFINITIONS):
            if isinstance(named := node.get(name), dict):
                waiting.extend(named.values())


def _references(root: Any) -> list[str]:
    return [node["$ref"] for node in _nodes(root) if isinstance(node.get("$ref"), str)]


def _check_joined_terms(source: str) -> None:
    """Raise `TooLarge` for a term that joins others with `&` beyond the limit."""
    bodies = _bodies(source)
    sizes: dict[str, int] = {}
    for name in _ordered(bodies):
        text, names, num_joins = bodies[name]
        size = len(text) + sum(sizes.get(one, 0) for one in names)
        sizes[name] = min(size ** min(num_joins + 1, 64), ENDLESS)
        if num_joins > 0 and sizes[name] > MAX_PRODUCT:
            raise TooLarge(
                f"`{name}` joins terms with `&` whose lengths multiply to more than"
                f" {MAX_PRODUCT:,}: shorten them, or join fewer"
            )


def _bodies(source: str) -> dict[str, tuple[str, set[str], int]]:
    """Return the text, the names and the number of joins of each rule."""
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
    """Yield the names of terms in topological order, without rules, which no term contains."""
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
