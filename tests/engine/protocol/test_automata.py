"""Automata that would be too large are refused before anything is compiled, with their place."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol.automata import TooLarge, check_grammar, check_schema
from engine.protocol.constraints import ConstrainedRequest
from engine.protocol.errors import RequestError
from engine.protocol.schemas import SchemaRules, served_schema


def ladder(height: int) -> dict[str, Any]:
    """Return definitions each of which holds the next one twice, joined with something."""
    steps = {
        f"d{i}": {
            "properties": {
                name: {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"required": [name]}]}
                for name in "ab"
            }
        }
        for i in range(height)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{height}": {"type": "object"}}}


def multiples(*steps: float) -> list[dict[str, Any]]:
    """Return a schema for each of these."""
    return [{"multipleOf": step} for step in steps]


BY_SCHEMA: list[tuple[dict[str, Any], str, str]] = [
    ({"multipleOf": 99_991}, "/multipleOf", "about 99,991 states"),
    ({"type": "integer", "allOf": multiples(9973, 9967)}, "", "about 99,420,831 states"),
    ({"multipleOf": 997, "allOf": multiples(991)}, "", "states"),
    ({"allOf": [{"anyOf": multiples(2, 991)}, {"multipleOf": 997}]}, "", "states"),
    (
        {"allOf": [{"properties": {"a": one}} for one in multiples(991, 997)]},
        "",
        "states",
    ),
    (
        {
            "properties": {"a": {"$ref": "#/$defs/x", "multipleOf": 997}},
            "$defs": {"x": {"multipleOf": 991}},
        },
        "/properties/a",
        "states",
    ),
    (
        {
            "items": {"$ref": "#here", "multipleOf": 997},
            "$defs": {"x": {"$anchor": "here", "multipleOf": 991}},
        },
        "/items",
        "states",
    ),
    ({"items": multiples(*range(7_001, 7_004))}, "/items/2/multipleOf", "21,006 states"),
    ({"multipleOf": 0.12347}, None, ""),  # type: ignore[list-item]
    ({"allOf": [{"pattern": f"a{i}"} for i in range(9)]}, "", "joins 9 patterns"),
    ({"allOf": [{"pattern": f"{i}" * 1_000} for i in range(3)]}, "", "lengths multiply"),
    ({"enum": [*range(2_000)], "pattern": "x" * 600}, "", "values with patterns"),
    ({"anyOf": [{"const": i} for i in range(2_000)], "pattern": "x" * 600}, "", "with patterns"),
    ({"allOf": [{"enum": [*range(2_000)]}, {"pattern": "x" * 600}]}, "", "with patterns"),
    ({"patternProperties": {f"^{i}_": {} for i in range(65)}}, "", "65 `patternProperties`"),
    (
        {"allOf": [{"patternProperties": {f"^{i}_{j}": {} for i in range(33)}} for j in "ab"]},
        "",
        "66 `patternProperties`",
    ),
    (ladder(12), "/$defs/d1/properties/b/allOf/0", "more than 20,000 schemas"),
]


@pytest.mark.parametrize(("schema", "place", "words"), BY_SCHEMA, ids=range(len(BY_SCHEMA)))
def test_a_schema_that_is_too_large_says_where(
    schema: dict[str, Any], place: str | None, words: str
) -> None:
    """By a JSON pointer, as what cannot be held to does."""
    if place is None:
        check_schema(schema)
        return
    with pytest.raises(TooLarge, match=words) as caught:
        check_schema(schema)
    assert caught.value.place == place
    with pytest.raises(RequestError, match=words) as refused:
        served_schema(schema, "response_format", SchemaRules())
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"price": {"multipleOf": 0.01}, "units": {"multipleOf": 1_000_000}}},
        {"multipleOf": 86_400},
        {"allOf": [*multiples(2, 5), {"pattern": "^a", "format": "date"}]},
        {"items": [{"pattern": "x" * 100, "format": "email"}] * 100},
        {"properties": {f"p{i}": {"pattern": "x" * 40} for i in range(2_000)}},
        {"allOf": [{"pattern": "x" * 5_000}, {"pattern": "y" * 5_000}]},
        {"enum": [*range(2_000)], "pattern": "^[A-Z]{2}[0-9]{1,9}$"},
        {"anyOf": [{"pattern": "x" * 40}] * 100},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}}}},
        {"$ref": "#/nowhere/1", "items": [{"$ref": "#/items/7"}, {"$ref": "#"}]},
        ladder(8),
    ],
    ids=range(11),
)
def test_what_people_write_passes(schema: dict[str, Any]) -> None:
    """Prices, seconds of a day, dates with a pattern, two long patterns, trees."""
    check_schema(schema)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(30)), "`T` joins terms"),
        ("start: B\nA: /a{20}b*a{20}/ & /[ab]*/\nB: A /x/ & A /y/ & A /z/", "`B` joins terms"),
        ('start: "a" %json {"multipleOf": 99991}', "about 99,991 states"),
        ('start: a b\na: %json {"multipleOf": 10001}\nb: %json {"multipleOf": 10009}', "states"),
    ],
    ids=range(4),
)
def test_a_grammar_that_is_too_large_is_refused(source: str, words: str) -> None:
    """By the term, or by what the schemas in it come to."""
    with pytest.raises(TooLarge, match=words):
        check_grammar(source)
    with pytest.raises(RequestError, match=words) as caught:
        ConstrainedRequest.model_validate({"grammar": source})
    assert (caught.value.param, caught.value.code) == ("grammar", "invalid_constraint")


@pytest.mark.parametrize(
    "source",
    [
        'start: "a & b & c & d & e & f" /x&y&z&/ T // & & & & & & & &\nT: /[a-z]{1,40}/ & ~/if|or/',
        "".join(f"T{i}: /[a-z]+{i}/ & ~/if|else/\n" for i in range(300)),
        "a: b | c\nb: a\nc: T & T\nT: U\nU: T",
        'start: %json {"multipleOf": 10} | %json not json',
    ],
    ids=range(4),
)
def test_a_grammar_that_people_write_passes(source: str) -> None:
    """Keywords that no name may be, signs in texts, circles that the compiler finds."""
    check_grammar(source)
