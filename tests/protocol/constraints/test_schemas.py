"""JSON schemas: the enforced part, and errors with their place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tidemill.protocol.constraints.schemas import SchemaRules, served_schema
from tidemill.protocol.errors import RequestError


def served(schema: object, rules: SchemaRules | None = None) -> dict[str, Any]:
    """Return the enforced schema."""
    return served_schema(schema, "regex", rules or SchemaRules())


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of nested lists."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_annotations_are_removed_and_the_rest_keeps_its_order() -> None:
    """They are titles, defaults, OpenAPI's keywords, and unknown keywords and formats."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "type": "object",
        "required": ["b"],
        "properties": {
            "b": {"type": "integer", "format": "int32", "nullable": True, "x-unit": "m"},
            "a": {"$ref": "#/$defs/A", "description": "d"},
            "title": {"type": "string", "format": "uuid"},
        },
        "$defs": {"A": {"anyOf": [True, {"items": [{"const": None}], "uniqueItems": False}]}},
        "x-guidance": {"lenient": True},
    }
    assert list(served(schema).items()) == [
        ("$schema", "https://json-schema.org/draft/2020-12/schema"),
        ("type", "object"),
        ("required", ["b"]),
        (
            "properties",
            {
                "b": {"type": "integer"},
                "a": {"$ref": "#/$defs/A"},
                "title": {"type": "string", "format": "uuid"},
            },
        ),
        ("$defs", {"A": {"anyOf": [True, {"items": [{"const": None}]}]}}),
        ("additionalProperties", False),
    ]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "/not"),
        (
            {"properties": {"a/b~": {"if": {}, "then": {"minimum": 1}}}},
            "/properties/a~1b~0/if",
        ),
        ({"anyOf": [{}, {"items": {"contains": {}}}]}, "/anyOf/1/items/contains"),
        ({"$defs": {"x": {"uniqueItems": True}}}, "/$defs/x/uniqueItems"),
        ({"dependentRequired": {"a": ["b"]}, "required": ["c"]}, "/dependentRequired"),
        ({"dependentRequired": []}, "/dependentRequired"),
        ({"dependentSchemas": {"a": {"minProperties": 1}}}, "/dependentSchemas"),
        ({"dependencies": {"a": ["b"]}}, "/dependencies"),
        ({"if": {}, "then": True, "else": {"type": "null"}}, "/if"),
        ({"not": True}, "/not"),
        ({"contains": {}, "minContains": 0, "maxContains": 1}, "/contains"),
        ({"contains": {}, "minItems": 1, "minContains": 2}, "/contains"),
        ({"uniqueItems": True, "maxItems": 2}, "/uniqueItems"),
        ({"unevaluatedItems": False, "prefixItems": [{}]}, "/unevaluatedItems"),
        ({"propertyNames": {"minLength": 1}}, "/propertyNames"),
        ({"propertyNames": {"type": 5}}, "/propertyNames"),
        ({"propertyNames": {"type": "integer", "enum": ["a"]}}, "/propertyNames"),
        ({"propertyNames": {"enum": 5}}, "/propertyNames"),
        (
            {"propertyNames": {"enum": ["a"]}, "unevaluatedProperties": False},
            "/unevaluatedProperties",
        ),
        (
            {
                "propertyNames": {"enum": [str(i) for i in range(2_000)]},
                "additionalProperties": {"enum": [str(i) for i in range(100)]},
            },
            "/propertyNames",
        ),
        ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"a": {}}}, "/propertyNames"),
        ({"type": 5, "uniqueItems": True}, "/type"),
        ({"propertyNames": {"$ref": "#/$defs/none"}}, "/propertyNames"),
        ({"propertyNames": {"pattern": "a\\"}}, "/propertyNames/pattern"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "/propertyNames"),
        (
            {"items": {"unevaluatedProperties": False, "enum": [{}]}},
            "/items/unevaluatedProperties",
        ),
        ({"$dynamicRef": "#x"}, "/$dynamicRef"),
        ({"divisibleBy": 2}, "/divisibleBy"),
        ({"type": "strin"}, "/type"),
        ({"type": []}, "/type"),
        ({"type": ["string", 5]}, "/type"),
        ({"minLength": "5"}, "/minLength"),
        ({"minLength": -1}, "/minLength"),
        ({"maxItems": 1.5}, "/maxItems"),
        ({"minProperties": 2, "required": ["a", "a"]}, "/minProperties"),
        ({"maxItems": float("inf")}, "/maxItems"),
        ({"exclusiveMinimum": True}, "/exclusiveMinimum"),
        ({"multipleOf": -3}, "/multipleOf"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"pattern": 5}, "/pattern"),
        ({"required": "a"}, "/required"),
        ({"required": [1]}, "/required"),
        ({"enum": "a"}, "/enum"),
        ({"properties": []}, "/properties"),
        ({"properties": {"a": 5}}, "/properties/a"),
        ({"anyOf": {}}, "/anyOf"),
        ({"anyOf": []}, "/anyOf"),
        ({"items": "a"}, "/items"),
        ({"items": [5]}, "/items/0"),
        ({"$ref": "http://example.com/a.json"}, "/$ref"),
        ({"$ref": "other.json#/a"}, "/$ref"),
        ({"pattern": "a\\"}, "/pattern"),
        ({"pattern": "^a|\\\\\\"}, "/pattern"),
        ({"patternProperties": {"^a\\": {}}}, "/patternProperties"),
        ({"items": {"minimum": 2**63}}, "/items/minimum"),
        ({"type": "integer", "exclusiveMaximum": -1e300}, "/exclusiveMaximum"),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 1}, "/minimum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
        ({"items": {"anyOf": [{"oneOf": [{"$ref": "#/$defs/a"}, True]}]}}, "/items/anyOf/0/oneOf"),
    ],
)
def test_an_unsupported_part_is_reported_with_its_place(schema: dict[str, Any], place: str) -> None:
    """The place is a JSON pointer into the original schema."""
    with pytest.raises(RequestError) as caught:
        served(schema)
    assert caught.value.message.startswith(f"`{place}` of `regex` ")
    assert (caught.value.param, caught.value.code) == ("regex", "invalid_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"type": "string", "title": "T"}},
        {"propertyNames": {}},
        {"dependentRequired": {}},
        {"dependentRequired": {"a": [], "b": ["b"]}},
        {"dependentSchemas": {"a": True, "b": {"description": "d"}}},
        {"dependencies": {"a": [], "b": {}}},
        {"not": False},
        {"if": {"required": ["a"]}},
        {"if": {"required": ["a"]}, "then": {}, "else": True},
        {"then": {"required": ["a"]}, "else": False},
        {"unevaluatedItems": True},
        {"contains": {"type": "null"}, "minContains": 0},
        {"minContains": 2, "maxContains": 0},
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"contains": {}, "minItems": 1},
        {"type": "string", "uniqueItems": True, "dependentRequired": {"a": ["b"]}},
        {"type": ["array", "null"], "propertyNames": False, "unevaluatedProperties": False},
        {"type": "object", "contains": False, "unevaluatedItems": False},
        {"items": {}, "unevaluatedItems": False},
        {"required": ["b"], "dependentRequired": {"a": ["b"]}},
    ],
)
def test_a_keyword_without_effect_is_allowed(schema: dict[str, Any]) -> None:
    """The same keywords are refused if they restrict values."""
    names = "type items required minItems maxItems".split()
    assert served(schema) == {name: value for name, value in schema.items() if name in names}


def test_an_unenforced_format_is_noted_with_its_place() -> None:
    """Formats are annotations: all of them are allowed, and those of numbers need no note."""
    notes: list[str] = []
    schema = {
        "properties": {
            "a": {"type": "string", "format": "regex"},
            "b": {"type": ["null", "string"], "format": "phone"},
            "c": {"type": "integer", "format": "int32"},
            "d": {"type": "string", "format": "uuid"},
        }
    }
    held = served_schema(schema, "field", SchemaRules(), notes)["properties"]
    assert [one.get("format") for one in held.values()] == [None, None, None, "uuid"]
    assert [note.partition(" is not enforced: ")[::2] for note in notes] == [
        (f"`/properties/{name}/format` of `field`", f"'{value}' is an annotation; {advice}")
        for name, value in (("a", "regex"), ("b", "phone"))
        for advice in ["add a `pattern` to enforce one."]
    ]


@pytest.mark.parametrize(
    ("names", "others", "held"),
    [
        (
            {"type": "string", "enum": ["a", "b"]},
            {"additionalProperties": {"type": "null"}},
            {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
        ),
        (
            {"$ref": "#/$defs/K"},
            {"properties": {"b": {"type": "null"}, "c": {}}, "$defs": {"K": {"enum": ["a", "b"]}}},
            {
                "properties": {"b": {"type": "null"}, "a": True},
                "$defs": {"K": {"enum": ["a", "b"]}},
            },
        ),
        ({"const": "a"}, {}, {"properties": {"a": True}}),
        ({"pattern": "^a"}, {}, {"patternProperties": {"^a": True}}),
    ],
)
def test_property_names_are_enforced_by_the_properties(
    names: dict[str, Any], others: dict[str, Any], held: dict[str, Any]
) -> None:
    """Zod and pydantic write the keys of their records and dictionaries this way."""
    assert served({"propertyNames": names, **others}) == {**held, "additionalProperties": False}


def test_a_count_may_be_written_as_a_float() -> None:
    """Spreadsheets and data frames write it so."""
    assert served({"maxItems": 2.0, "minimum": 2.5}) == {"maxItems": 2, "minimum": 2.5}
    assert isinstance(served({"maxItems": 2.0})["maxItems"], int)


def test_depth_and_references_are_limited() -> None:
    """A deeper schema, or one with more references, could crash its readers."""
    assert served(nested(50))
    with pytest.raises(RequestError, match="too deep"):
        served(nested(51))
    with pytest.raises(RequestError, match="too deep"):
        served(nested(600))
    refers = {"$ref": "#/$defs/a"}
    assert served({"anyOf": [refers] * 1_000})
    with pytest.raises(RequestError, match="too many"):
        served({"anyOf": [refers] * 1_001})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1900-02-28", "0400-02-29", "2023-12-31", "0010-01-01"],
            ["2023-02-29", "1900-02-29", "0000-02-29", "0000-01-01"],
        ),
        ("time", ["10:10:59Z", "23:59:00+01:00"], ["10:10:60Z", "23:59:60Z"]),
        (
            "date-time",
            ["2024-02-29T10:10:59Z", "2023-01-01t00:00:00.5z"],
            ["2023-02-29T10:10:10Z", "2023-01-01T10:10:60Z"],
        ),
    ],
)
def test_dates_and_times_exist(name: str, good: list[str], bad: list[str]) -> None:
    """The format itself allows more; leap seconds are never generated."""
    schema = served({"type": "string", "format": name, "allOf": [{"minLength": 1}]})
    first, narrower = schema["allOf"]
    assert first == {"minLength": 1}
    pattern = re.compile(narrower["pattern"])
    for text in good:
        assert pattern.search(text), text

    for text in bad:
        assert not pattern.search(text), text
