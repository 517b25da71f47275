"""Automata that would be too large are refused with their place before anything is compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.constraints import automata
from tidemill.protocol.constraints.automata import check_grammar, check_schema
from tidemill.protocol.constraints.schemas import SchemaRules, served_schema
from tidemill.protocol.constraints.sizes import TooLarge
from tidemill.protocol.errors import RequestError


def ladder(height: int) -> dict[str, Any]:
    """Return definitions that each contain the next one twice, joined with something."""
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


STEPS_A = {"properties": {"a": {"multipleOf": 997}}}
LONG_A = {"properties": {"a": {"pattern": "x" * 600}}}
X_Y = {"$ref": "#/$defs/x%20y"}
BY_SCHEMA: list[tuple[dict[str, Any], str, str]] = [
    ({"multipleOf": 99_991}, "/multipleOf", "about 99,991 states"),
    ({"type": "integer", "allOf": multiples(9973, 9967)}, "", "about 99,400,891 states"),
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
    ({"items": multiples(*range(15_001, 15_005))}, "/items/3/multipleOf", "60,010 states"),
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
    (
        {"$defs": {"x y": {"multipleOf": 4001}}, "allOf": [X_Y, {"multipleOf": 4003}]},
        "",
        "about 16,016,003 states",
    ),
    ({"allOf": [{"properties": {"a": {"enum": [*range(2_000)]}}}, LONG_A]}, "", "with patterns"),
    ({"allOf": [{"additionalProperties": {"multipleOf": 991}}, STEPS_A]}, "", "states"),
    ({"allOf": [{"patternProperties": {"^": {"multipleOf": 991}}}, STEPS_A]}, "", "states"),
    ({"allOf": [{"items": {"multipleOf": 991}}, {"items": multiples(997)}]}, "", "states"),
    ({"allOf": [{"anyOf": [STEPS_A, {}]}, {"anyOf": [STEPS_A, {}]}]}, "", "states"),
    (
        {"allOf": [{"anyOf": [{"properties": {"a": {"const": i}}} for i in range(2_000)]}, LONG_A]},
        "",
        "with patterns",
    ),
    ({"properties": {"a": {"multipleOf": 997}}, "allOf": [STEPS_A]}, "", "states"),
    ({**STEPS_A, "patternProperties": {"^a": {"multipleOf": 991}}}, "", "states"),
    (ladder(12), "/$defs/d1/properties/b/allOf/0", "more than 20,000 schemas"),
]


@pytest.mark.parametrize(("schema", "place", "words"), BY_SCHEMA, ids=range(len(BY_SCHEMA)))
def test_a_schema_that_is_too_large_is_reported_with_its_place(
    schema: dict[str, Any], place: str | None, words: str
) -> None:
    """The place is a JSON pointer, as for unsupported keywords."""
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
def test_usual_schemas_are_accepted(schema: dict[str, Any]) -> None:
    """They have prices, seconds of a day, dates with a pattern, two long patterns, and trees."""
    check_schema(schema)


def closed(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object with only these properties, as strict mode requires."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def optional(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that pydantic writes for a nullable value."""
    return {"anyOf": [schema, {"type": "null"}]}


DATE = {"type": "string", "format": "date"}
DATE_TIME = {"type": "string", "format": "date-time"}
UUID = {"type": "string", "format": "uuid"}
CODES = {"type": "string", "enum": [f"C{i}" for i in range(250)]}
EVERYDAY: dict[str, dict[str, Any]] = {
    "optional dates": closed(**{f"f{i}": optional(DATE) for i in range(100)}),
    "optional date-times": closed(**{f"f{i}": optional(DATE_TIME) for i in range(100)}),
    "an optional model": {
        **closed(a=optional({"$ref": "#/$defs/M"})),
        "$defs": {"M": closed(day=DATE, code=CODES)},
    },
    "a choice of two objects": closed(a={"anyOf": [closed(at=DATE_TIME), closed(code=CODES)]}),
    "events": closed(
        events={
            "type": "array",
            "items": {
                "oneOf": [
                    closed(kind={"const": f"k{i}"}, at=DATE_TIME, code=CODES) for i in range(3)
                ]
            },
        }
    ),
    "an inherited object": {
        "allOf": [
            {"type": "object", "properties": {"createdAt": DATE_TIME}},
            {"type": "object", "properties": {"dueAt": DATE_TIME}},
        ]
    },
    "an object next to its base": {
        "type": "object",
        "properties": {"createdAt": DATE_TIME},
        "allOf": [{"$ref": "#/$defs/base"}],
        "$defs": {"base": {"type": "object", "properties": {"dueAt": DATE_TIME}}},
    },
    "mixins with ids": {"allOf": [{"properties": {f"id{i}": UUID}} for i in range(5)]},
    "mixins with patterns": {
        "allOf": [{"properties": {f"p{i}": {"pattern": "^[A-Z]$"}}} for i in range(9)]
    },
    "equal steps": closed(**{f"p{i}": {"multipleOf": 86_400} for i in range(20)}),
    "several steps": closed(a={"multipleOf": 86_400}, b={"multipleOf": 43_200}),
    "no position": {"properties": {"a": {"$ref": "#/prefixItems/²"}}, "prefixItems": [{}]},
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_schemas_are_accepted(name: str) -> None:
    """Dates of several properties do not multiply, and neither do lists of values."""
    served_schema(EVERYDAY[name], "response_format", SchemaRules())


def test_tools_with_dates_are_accepted_together() -> None:
    """Thirty tools have two optional dates each, in one grammar."""
    schema = closed(since=optional(DATE_TIME), until=optional(DATE_TIME))
    text = json.dumps(served_schema(schema, "tools", SchemaRules()))
    check_grammar("".join(f"t{i}: %json {text}\n" for i in range(30)))


def test_equal_references_with_different_spellings_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their target is visited once; values in it that are not schemas are skipped."""
    walked = []
    nodes = automata._nodes

    def counted(root: Any) -> Iterator[dict[str, Any]]:
        for node in nodes(root):
            walked.append(node)
            yield node

    monkeypatch.setattr(automata, "_nodes", counted)
    check_schema(
        {
            "$defs": {"B": {"enum": [{"$ref": "#/$defs/" + "B" * i} for i in range(100)]}},
            "anyOf": [
                {"$ref": reference}
                for reference in ("#/$defs/B", "#/%24defs/B", "#/$defs/%42", "#/$de%66s/B")
            ],
        }
    )
    # Each of the 6 for anchors and for references, and once for the target.
    assert len(walked) == 6 + 6 + 1


def test_joined_objects_of_many_members_are_refused() -> None:
    """Their references double the number of members to join."""
    steps = {
        f"{kind}{i}": {
            "properties": {name: {"$ref": f"#/$defs/{kind}{i + 1}"} for name in "ab"},
        }
        for kind in "de"
        for i in range(30)
    }
    ends = {f"{kind}30": {"pattern": "^a"} for kind in "de"}
    schema = {"$defs": {**steps, **ends}, "allOf": [{"$ref": f"#/$defs/{kind}0"} for kind in "de"]}
    with pytest.raises(TooLarge, match="more than 50,000 members"):
        check_schema(schema)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(30)), "`T` joins terms"),
        ("start: B\nA: /a{20}b*a{20}/ & /[ab]*/\nB: A /x/ & A /y/ & A /z/", "`B` joins terms"),
        ('start: "a" %json {"multipleOf": 99991}', "about 99,991 states"),
        ("".join(f'a{i}: %json {{"multipleOf": {i}}}\n' for i in range(15001, 15005)), "60,010"),
    ],
    ids=range(4),
)
def test_a_grammar_that_is_too_large_is_refused(source: str, words: str) -> None:
    """The error has the term, or the size of the schemas in it."""
    with pytest.raises(TooLarge, match=words):
        check_grammar(source)
    with pytest.raises(RequestError, match=words) as caught:
        CompletionRequest.model_validate({"prompt": "Hi", "grammar": source})
    assert (caught.value.param, caught.value.code) == ("grammar", "invalid_constraint")


@pytest.mark.parametrize(
    "source",
    [
        'start: "a & b & c & d & e & f" /x&y&z&/ T // & & & & & & & &\nT: /[a-z]{1,40}/ & ~/if|or/',
        "".join(f"T{i}: /[a-z]+{i}/ & ~/if|else/\n" for i in range(300)),
        "a: b | c\nb: a\nc: T & T\nT: U\nU: T",
        'start: %json {"multipleOf": 10} | %json not json',
        "root ::= [a&b&c&d&e&f]+ # " + "x & y & " * 40 + "\n",
    ],
    ids=range(5),
)
def test_a_usual_grammar_is_accepted(source: str) -> None:
    """It has keywords that cannot be names, operators in texts, and cycles for the compiler."""
    check_grammar(source)
