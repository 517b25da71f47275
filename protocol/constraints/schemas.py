"""JSON schemas: extracts the enforceable part for constrained decoding, and refuses the rest.

The dialect is JSON Schema 2020-12, with equivalent keywords of older drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..validation import has_open_escape, short_repr
from .automata import MULTIPLYING, check_schema
from .closing import Unclosable, close_objects
from .disjoint import Disjointness, Overlap
from .formats import FORMATS, NARROWER
from .idle_keywords import IdleKeywords
from .listed_properties import KINDS
from .look_ahead import LookAroundError, looks_around, plain_pattern, plain_patterns
from .ranges import BOUNDS, RangeError, held_range
from .schema_facts import pointer_part, resolved
from .sizes import TooLarge

MAX_DEPTH = 50
MAX_REFERENCES = 1_000
MAX_PROPERTIES = 2_000
MAX_PATTERN_CHARS = 5_000
MAX_LOOK_AHEADS = 32
_MAX_NOTES = 5
_MAX_COPIED_CHARS = 2**18  # limit for copies of schemas of values, one for each name
_TYPES = frozenset("null boolean object array number string integer".split())
_ONE_SCHEMA = frozenset(
    ["items", "additionalProperties", "additionalItems", "unevaluatedProperties"]
)
_SCHEMAS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
_NAMED_SCHEMAS = frozenset(["properties", "patternProperties", "$defs", "definitions"])
_REFUSED = frozenset(
    "not if then else dependentSchemas dependentRequired dependencies contains minContains"
    " maxContains propertyNames unevaluatedItems uniqueItems $dynamicRef"
    " $recursiveRef disallow extends divisibleBy".split()
)
_REMARKS = frozenset(
    "$comment $vocabulary $dynamicAnchor $recursiveAnchor title description default examples"
    " example deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema nullable"
    " discriminator xml externalDocs".split()
)


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """Schema rules: `is_strict` is OpenAI's strict mode, which refuses unknown keywords."""

    is_strict: bool = False


def served_schema(
    schema: object, param: str, rules: SchemaRules, notes: list[str] | None = None
) -> dict[str, Any]:
    """Return the schema to enforce: without annotations, and with closed objects.

    `notes` gets the parts that have no effect although users may expect one.
    Raises `RequestError` with the keyword and its place (a JSON pointer) if a part cannot be
    enforced or is invalid.
    """
    reading = _Reading(schema, param, rules)
    served = reading.schema(schema, "", 0)
    if notes is not None:
        notes += reading.notes
    if isinstance(served, bool):
        if not served:
            raise RequestError(f"`{param}` is false, which allows no value.", param=param)
        return {}
    reading.check_choices(served)
    reading.close_objects(served)
    if not reading.multiplies:
        return served
    try:
        check_schema(served)
    except TooLarge as exc:
        raise reading.error(exc.place, str(exc)) from None
    return served


class _Reading:
    """Parser of one schema; `place` is the JSON pointer of a part.

    A schema that `multiplies` may be too large to compile.
    """

    def __init__(self, root: object, param: str, rules: SchemaRules) -> None:
        self._root = root
        self._param = param
        self._rules = rules
        self._num_references = 0
        self._num_copied = 0
        self._choices: list[tuple[str, dict[str, Any]]] = []
        self._has_bases = False
        self._look_aheads: set[str] = set()
        self._has_unevaluated_names = False
        self._rests: dict[int, str] = {}  # places of `unevaluatedProperties`, by their schemas
        self.multiplies = False
        self.notes: list[str] = []

    def schema(self, schema: object, place: str, depth: int) -> dict[str, Any] | bool:
        """Return the enforceable part of the schema at `place`, nested in `depth` others."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.error(place, f"must be an object or a boolean; got {short_repr(schema)}")
        if depth > MAX_DEPTH:
            raise self.error(place, f"is nested too deeply: the limit is {MAX_DEPTH} levels")
        served: dict[str, Any] = {}
        idle = frozenset() if _REFUSED.isdisjoint(schema) else _IDLE.find(schema)
        for keyword, value in schema.items():
            if keyword not in idle:
                served |= self._keyword(keyword, value, f"{place}/{pointer_part(keyword)}", depth)
        self._note_format(schema, place)
        self._settle_rest(served, place)
        if "propertyNames" in schema and "propertyNames" not in idle:
            self._hold_names(served, schema["propertyNames"], f"{place}/propertyNames")
        self._hold(served, place)
        return served

    def _hold(self, served: dict[str, Any], place: str) -> None:
        """Convert keywords that depend on others to a form that can be enforced."""
        self.multiplies |= not MULTIPLYING.isdisjoint(served)
        # `required` may repeat listed names, so counting them is not enough.
        least = served.get("minProperties", 0)
        if least > 1 and len(set(served.get("required", ()))) < least:
            raise self.error(f"{place}/minProperties", "above 1 with `required` is not supported")
        if "oneOf" in served:
            self._choices.append((place, served))
        self._has_bases |= bool(place) and ("$id" in served or "id" in served)
        if (narrower := NARROWER.get(served.get("format", ""))) is not None:
            served["allOf"] = [*served.get("allOf", []), {"pattern": narrower}]
        self._hold_look_ahead(served, place)
        if not served.keys().isdisjoint(BOUNDS):
            self._hold_range(served, place)

    def _note_format(self, schema: Mapping[str, Any], place: str) -> None:
        """Add a note on a string format that is not enforced."""
        name = schema.get("format", "date")
        kinds = schema.get("type", "string")
        if name not in FORMATS and "string" in kinds and len(self.notes) < _MAX_NOTES:
            self.notes.append(
                f"`{place}/format` of `{self._param}` is not enforced: {short_repr(name)} is an"
                " annotation; add a `pattern` to enforce one."
            )

    def check_choices(self, root: dict[str, Any]) -> None:
        """Refuse a `oneOf` with overlapping schemas: a grammar can only express `anyOf`.

        References are not resolved if parts of the schema have their own `$id`.
        """
        disjointness = Disjointness(root, resolves=not self._has_bases)
        proved = []
        for place, schema in self._choices:
            try:
                proved.append((schema, disjointness.disjoint(schema)))
            except Overlap as exc:
                words = (
                    f"is not supported, because a value may satisfy both {exc.first} and"
                    f" {exc.second} of it: give each a required property with a different `const`,"
                    " or"
                )
                if disjointness.is_exhausted:
                    words = "has too many schemas to compare:"
                helps = "use `anyOf` if any match is enough"
                raise self.error(f"{place}/oneOf", f"{words} {helps}") from None
        for schema, ways in proved:
            schema["oneOf"] = ways
        disjointness.fill()

    def close_objects(self, root: dict[str, Any]) -> None:
        """Close the objects, after `oneOf` has been checked without it."""
        for place in self._rests.values():
            if self._has_unevaluated_names:
                raise self.error(place, "is not supported if `propertyNames` lists names")
        try:
            close_objects(root, resolves=not self._has_bases, places=self._rests)
        except Unclosable as exc:
            raise self.error(
                exc.place, "is not supported next to several choices or known values"
            ) from None

    def _settle_rest(self, served: dict[str, Any], place: str) -> None:
        """Drop an `unevaluatedProperties` that has no effect; keep the place of any other."""
        rest = served.get("unevaluatedProperties")
        if rest is None:
            return
        if rest in (True, {}):
            served.setdefault("additionalProperties", True)
        if "additionalProperties" in served:
            del served["unevaluatedProperties"]
        else:
            self._rests[id(served)] = f"{place}/unevaluatedProperties"

    def _hold_look_ahead(self, served: dict[str, Any], place: str) -> None:
        """Rewrite a pattern with look-ahead as plain patterns, all of which must match."""
        if "pattern" not in served:
            return
        first, *others = self._plain(served["pattern"], f"{place}/pattern", plain_patterns)
        served["pattern"] = first
        if others:
            served["allOf"] = [*served.get("allOf", []), *({"pattern": each} for each in others)]

    def _plain(
        self, pattern: str, place: str, write: Callable[[str], tuple[str, ...]]
    ) -> tuple[str, ...]:
        """Return a pattern without look-ahead, as written by `write`."""
        try:
            if not looks_around(pattern):
                return (pattern,)
            written = write(pattern)
        except LookAroundError as exc:
            raise self.error(place, f"is {short_repr(pattern)}: {exc}") from None
        self._look_aheads.add(pattern)
        if len(self._look_aheads) > MAX_LOOK_AHEADS:
            raise self.error(
                place, f"is one of more than {MAX_LOOK_AHEADS} patterns with look-ahead: too many"
            )
        return written

    def _hold_names(self, served: dict[str, Any], names: object, place: str) -> None:
        """Express property names by the properties themselves, or by a pattern of names."""
        if isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = resolved(self._root, names["$ref"])
        found = names if isinstance(names, dict) else {}
        keywords = found.keys() & _ASSERTIONS - {"type"}
        values = [found["const"]] if keywords == {"const"} else found.get("enum")
        rest = served.get("additionalProperties", True)
        self._has_unevaluated_names |= "additionalProperties" not in served
        if found.get("type", "string") != "string":
            raise self.error(place, "is not supported in JSON schemas")
        if keywords in ({"enum"}, {"const"}) and isinstance(values, list):
            listed = served.get("properties", {})
            known = [name for name in listed if name in values]
            known += [name for name in values if isinstance(name, str) and name not in listed]
            served["properties"] = {name: listed.get(name, rest) for name in known}
            self._num_copied += len(json.dumps(rest)) * len(known)
            is_large = len(known) > MAX_PROPERTIES or self._num_copied > _MAX_COPIED_CHARS
            if "patternProperties" in served or is_large:
                raise self.error(place, "is not supported with many names or name patterns")
        elif keywords == {"pattern"} and served.keys().isdisjoint(KINDS):
            pattern = found["pattern"]
            self._keyword("pattern", pattern, f"{place}/pattern", 0)
            plain = self._plain(pattern, f"{place}/pattern", plain_pattern)
            served["patternProperties"] = dict.fromkeys(plain, rest)
        else:
            raise self.error(place, "is not supported in JSON schemas")
        served["additionalProperties"] = False

    def _hold_range(self, served: dict[str, Any], place: str) -> None:
        try:
            bounds = held_range(served)
        except RangeError as exc:
            raise self.error(f"{place}/{exc.keyword}", str(exc)) from None
        for keyword in served.keys() & set(BOUNDS):
            if served[keyword] is not bounds.get(keyword):
                del served[keyword]
        served |= bounds

    def _keyword(self, keyword: str, value: object, place: str, depth: int) -> dict[str, Any]:
        if keyword == "items" and isinstance(value, list):
            return {"items": self._schemas(value, place, depth)}
        if keyword in _ONE_SCHEMA:
            return {keyword: self.schema(value, place, depth + 1)}
        if keyword in _SCHEMAS:
            return {keyword: self._schemas(value, place, depth)}
        if keyword in _NAMED_SCHEMAS:
            return {keyword: self._named_schemas(value, place, depth)}
        if keyword in _CHECKS:
            wanted, is_right = _CHECKS[keyword]
            if not is_right(value):
                raise self.error(place, f"must be {wanted}; got {short_repr(value)}")
            return self._checked(keyword, value, place)
        if keyword in _REFUSED and keyword != "propertyNames":
            raise self.error(place, "is not supported in JSON schemas")
        if self._rules.is_strict and keyword not in _REMARKS | _REFUSED:
            raise self.error(place, "is an unknown keyword, which `strict` does not allow")
        return {}

    def _schemas(self, values: object, place: str, depth: int) -> list[dict[str, Any] | bool]:
        if not isinstance(values, list) or not values:
            raise self.error(place, f"must be a list of schemas; got {short_repr(values)}")
        return [self.schema(one, f"{place}/{i}", depth + 1) for i, one in enumerate(values)]

    def _named_schemas(
        self, values: object, place: str, depth: int
    ) -> dict[str, dict[str, Any] | bool]:
        if not isinstance(values, dict):
            raise self.error(place, f"must be an object of schemas; got {short_repr(values)}")
        if len(values) > MAX_PROPERTIES:
            raise self.error(place, f"has more than {MAX_PROPERTIES:,} items: too many")
        has_patterns = place.endswith("/patternProperties")
        if has_patterns and any(map(has_open_escape, values)):
            raise self.error(place, "has a name that ends in an unescaped backslash")
        return {
            held: self.schema(one, f"{place}/{pointer_part(name)}", depth + 1)
            for name, one in values.items()
            for held in self._held_name(name, place, is_pattern=has_patterns)
        }

    def _held_name(self, name: str, place: str, *, is_pattern: bool) -> tuple[str, ...]:
        """Return a member's name, or a name pattern without look-ahead."""
        if not is_pattern:
            return (name,)
        return self._plain(name, f"{place}/{pointer_part(name)}", plain_pattern)

    def _checked(self, keyword: str, value: Any, place: str) -> dict[str, Any]:
        """Return a keyword whose value has the right type, unless it is an annotation."""
        if _CHECKS[keyword] is _COUNT:
            return {keyword: int(value)}
        if keyword == "format" and value not in FORMATS:
            return {}
        if keyword == "required" and len(value) > MAX_PROPERTIES:
            raise self.error(place, f"lists more than {MAX_PROPERTIES:,} names: too many")
        if keyword == "pattern" and len(value) > MAX_PATTERN_CHARS:
            raise self.error(place, f"has more than {MAX_PATTERN_CHARS:,} characters: too many")
        if keyword == "pattern" and has_open_escape(value):
            raise self.error(place, "ends in an unescaped backslash")
        if keyword == "$ref":
            self._num_references += 1
            if not value.startswith("#"):
                raise self.error(place, f"must refer to the schema itself; got {short_repr(value)}")
            if self._num_references > MAX_REFERENCES:
                raise self.error(
                    place, f"is one of more than {MAX_REFERENCES:,} references: too many"
                )
        return {keyword: value}

    def error(self, place: str, words: str) -> RequestError:
        """Return the error for a part of the schema."""
        where = f"`{place}` of `{self._param}`" if place else f"`{self._param}`"
        return RequestError(f"{where} {words}.", param=self._param, code="invalid_schema")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool) and value >= 0  # type: ignore[operator]


def _is_step(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_anything(value: object) -> bool:
    del value
    return True


_Check = tuple[str, Callable[[object], bool]]
_NUMBER: _Check = ("a number", _is_number)
_COUNT: _Check = ("an integer of at least 0", _is_count)
_TEXT: _Check = ("a string", _is_text)
# Keywords that constrain a value, and the type that each requires.
_CHECKS: Mapping[str, _Check] = {
    "type": (f"one of {', '.join(sorted(_TYPES))}, or a list of them", _is_type),
    "const": ("anything", _is_anything),
    "enum": ("a list", _is_list),
    "required": ("a list of strings", _is_names),
    "multipleOf": ("a number above 0", _is_step),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"), _NUMBER),
    **dict.fromkeys(
        ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties"), _COUNT
    ),
    **dict.fromkeys(("pattern", "format", "$ref", "$anchor", "$id", "id", "$schema"), _TEXT),
}
_ASSERTIONS = (
    _ONE_SCHEMA
    | _SCHEMAS
    | _REFUSED
    | {"properties", "patternProperties", *_CHECKS} - {"$anchor", "$id", "id", "$schema"}
)
_IDLE = IdleKeywords(_ASSERTIONS)
