"""Closing of objects: they have only listed properties, and still satisfy the original schema."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, Literal, cast
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, ConfigDict, Field

from tidemill.protocol.constraints.request import json_layout
from tidemill.protocol.constraints.schemas import SchemaRules, served_schema
from tidemill.protocol.errors import RequestError
from tidemill.protocol.tools import Tool

TOKENS = LLTokenizer("byte")
WHOLE = {"type": "integer", "minimum": 0, "maximum": 9}


def ref(name: str) -> dict[str, Any]:
    """Return a reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


def listing(*names: str, required: str = "", **others: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, each a digit."""
    schema = {"type": "object", "properties": dict.fromkeys(names, WHOLE), **others}
    return {**schema, "required": required.split()} if required else schema


def tagged(tag: str, *names: str) -> dict[str, Any]:
    """Return the schema of an object with the discriminator `t`."""
    schema = listing(*names, required="t")
    return {**schema, "properties": {"t": {"const": tag}, **schema["properties"]}}


def served(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the enforced schema."""
    return served_schema(copy.deepcopy(schema), "field", SchemaRules())


def matcher_of(schema: dict[str, Any]) -> LLMatcher:
    """Return a matcher of the compact JSON of a schema."""
    layout = cast("Any", json_layout(""))
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=layout)
    return LLMatcher(TOKENS, grammar, log_level=0)


def allows(schema: dict[str, Any], value: object) -> bool:
    """Say whether a value can be generated."""
    found = matcher_of(schema)
    assert not found.is_error(), found.get_error()
    tokens = TOKENS.tokenize_str(json.dumps(value, separators=(",", ":")))
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


PETS = {"oneOf": [ref("Cat"), ref("Dog")]}
PET_DEFS = {"Pet": PETS, "Cat": tagged("cat", "m"), "Dog": tagged("dog", "b")}
NODE = {"type": "object", "properties": {"v": WHOLE, "kids": {"items": {"allOf": [ref("N")]}}}}
COMPOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "plain": (listing("a"), [{}, {"a": 1}], [{"a": 1, "z": 1}]),
    "nested": ({"items": listing("a")}, [[{"a": 1}]], [[{"z": 1}]]),
    "map": (
        {"type": "object", "additionalProperties": listing("a")},
        [{"k": {"a": 1}}],
        [{"k": {"z": 1}}],
    ),
    "required alone": (listing("a", required="a x"), [{"a": 1, "x": {"y": 1}}], [{"a": 1}]),
    "no properties": ({"type": "object", "required": ["a"]}, [{"a": 1, "z": 1}], []),
    "an excluded one": ({"type": "object", "properties": {"a": False}}, [{"z": 1}], [{"a": 1}]),
    "patterns": (
        listing("a", patternProperties={"^x": WHOLE}),
        [{"a": 1, "x1": 2}],
        [{"z": 1}, {"x1": "s"}],
    ),
    "opened": (listing("a", additionalProperties=True), [{"a": 1, "z": 1}], []),
    "opened as unevaluated": (listing("a", unevaluatedProperties={}), [{"a": 1, "z": 1}], []),
    "opened in a part": (
        {"allOf": [listing("a", additionalProperties=WHOLE), listing("b")]},
        [{"a": 1, "b": 1, "z": 1}],
        [],
    ),
    "values": ({**listing("a"), "enum": [{"a": 1, "z": 2}]}, [{"a": 1, "z": 2}], []),
    "allOf": (
        {"allOf": [listing("a", required="a"), listing("b", required="b")]},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "z": 1}],
    ),
    "a base and branches": (
        listing("a", anyOf=[listing("b", required="b"), listing("c"), {"required": ["a"]}]),
        [{"a": 1, "b": 2}, {"a": 1, "c": 1}, {}],
        [{"a": 1, "b": 2, "c": 3}, {"b": 1, "z": 1}, {"a": 1, "z": 1}],
    ),
    "branches that list nothing new": (
        listing("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "z": 1}],
    ),
    "an open branch": (
        {"anyOf": [listing("a"), {"type": "object"}, {"type": "null"}]},
        [{"a": 1}, {"z": 1}, None],
        [],
    ),
    "two choices": (
        {
            "allOf": [
                {"anyOf": [listing("a", required="a"), listing("b", required="b")]},
                {"anyOf": [listing("c", required="c"), listing("d", required="d")]},
            ]
        },
        [{"a": 1, "c": 1}, {"b": 1, "d": 1}],
        [{"a": 1, "b": 1, "c": 1}, {"a": 1, "c": 1, "d": "s"}, {"a": 1, "c": 1, "z": 1}],
    ),
    "a recursive base": (
        {
            "allOf": [ref("B"), listing("x", required="x")],
            "$defs": {"B": {"type": "object", "properties": {"b": ref("B"), "w": WHOLE}}},
        },
        [{"b": {"b": {"w": 1}}, "x": 1}],
        [{"x": 1, "z": 1}, {"b": {"x": 1}, "x": 1}],
    ),
    "a union as a base": (
        {"allOf": [ref("Pet"), listing("owner", required="owner")], "$defs": PET_DEFS},
        [{"t": "cat", "m": 1, "owner": 1}, {"t": "dog", "b": 1, "owner": 1}],
        [{"t": "cat", "b": 1, "owner": 1}, {"t": "cat", "owner": 1, "z": 1}],
    ),
    "one definition alone and as a base": (
        {
            "type": "object",
            "properties": {"one": ref("B"), "two": {**ref("B"), **listing("c")}},
            "$defs": {"B": {"$anchor": "base", **listing("b")}},
            "anyOf": [{"properties": {"three": {"allOf": [{"$ref": "#base"}]}}}],
        },
        [{"one": {"b": 1}, "two": {"b": 1, "c": 1}, "three": {"b": 1}}],
        [{"one": {"c": 1}}, {"two": {"z": 1}}, {"three": {"z": 1}}],
    ),
    "a recursion through allOf": (
        {**ref("N"), "$defs": {"N": NODE}},
        [{"v": 1, "kids": [{"v": 2, "kids": []}]}],
        [{"z": 1}, {"kids": [{"z": 1}]}],
    ),
    "a recursion entered at its end": (
        {
            **ref("B"),
            "properties": {"a": WHOLE},
            "$defs": {
                "A": {"type": "object", "properties": {"b": ref("B")}},
                "B": {"allOf": [ref("A"), listing("c")]},
            },
        },
        [{"b": {"b": {"c": 1}}, "c": 1, "a": 1}],
        [{"z": 1}, {"b": {"a": 1}}],
    ),
    "the root": (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        [{"next": {"next": None}}],
        [{"next": {"z": 1}}],
    ),
    "unevaluatedProperties: false": (
        {"allOf": [listing("a"), listing("b", anyOf=[listing("c"), listing("d")])]}
        | {"unevaluatedProperties": False},
        [{"a": 1, "b": 1, "c": 1}, {"d": 1}],
        [{"z": 1}],
    ),
    "unevaluatedProperties of a type": (
        {"allOf": [listing("a"), listing("b")], "unevaluatedProperties": {"type": "boolean"}},
        [{"a": 1, "z": True}],
        [{"a": True}, {"z": 1}],
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_an_object_has_only_the_properties_listed_at_its_place(name: str) -> None:
    """Properties of other parts and of the chosen branch are allowed, and no others."""
    schema, good, bad = COMPOSED[name]
    held = served(schema)
    assert [value for value in good if not allows(held, value)] == []
    assert [value for value in bad if allows(held, value)] == []
    judge = Draft202012Validator(schema)
    assert [value for value in good if not judge.is_valid(value)] == []


class Reply(BaseModel):
    """A model as users write it, with a nested list, an optional field and a recursion."""

    topic: Literal["a", "b"]
    level: int = Field(default=1, ge=0, le=9)
    replies: list[Reply] = []


class Free(BaseModel):
    """A model that allows other properties."""

    model_config = ConfigDict(extra="allow")
    topic: Literal["a", "b"]


# Output of zod 4's `z.toJSONSchema(…, {io: "input"})` and of TypeBox's `Type.Intersect`.
ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "pet": {
            "anyOf": [
                {
                    "oneOf": [
                        {
                            "type": "object",
                            "properties": {"kind": {"type": "string", "const": kind}, name: WHOLE},
                            "required": ["kind", name],
                        }
                        for kind, name in (("cat", "lives"), ("dog", "age"))
                    ]
                },
                {"type": "null"},
            ]
        }
    },
    "required": ["pet"],
}
TYPEBOX = {
    "type": "object",
    "allOf": [
        {"type": "object", "required": ["topic"], "properties": {"topic": {"const": "a"}}},
        {"type": "object", "properties": {"level": WHOLE}},
    ],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (Reply.model_json_schema(), {"topic": "a", "replies": [{"topic": "b"}]}, "z"),
        (Free.model_json_schema(), {"topic": "a", "z": {"y": 1}}, None),
        (
            to_strict_json_schema(Reply),
            {"topic": "a", "level": 2, "replies": [{"topic": "b", "level": 1, "replies": []}]},
            "z",
        ),
        (ZOD, {"pet": {"kind": "cat", "lives": 9}}, "z"),
        (TYPEBOX, {"topic": "a", "level": 1}, "z"),
    ],
    ids=["pydantic", "pydantic extra=allow", "OpenAI's parse", "zod", "TypeBox"],
)
def test_the_schemas_of_common_libraries_are_closed(
    schema: dict[str, Any], good: dict[str, Any], bad: str | None
) -> None:
    """An invented property is refused at the root, in lists, and in unions."""
    held = served(schema)
    assert allows(held, good)
    if bad is not None:
        assert not allows(held, {**good, bad: 1})
        for name, value in good.items():
            inner = value[0] if isinstance(value, list) else value
            if isinstance(inner, dict):
                changed: Any = {**inner, bad: 1}
                changed = [changed] if isinstance(value, list) else changed
                assert not allows(held, {**good, name: changed})


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (listing("a"), {"a": 1}, {"a": 1, "z": 1}),
        ({"type": "object", "properties": {}}, {}, {"z": 1}),
        ({"properties": {"a": listing("b")}}, {"a": {"b": 1}}, {"a": {"z": 1}}),
        ({"type": "object"}, {"z": 1}, [1]),
    ],
)
def test_arguments_of_tools_are_closed(
    parameters: dict[str, Any], good: object, bad: object, *, strict: bool | None
) -> None:
    """A function with empty `properties` has no arguments."""
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tool = Tool.model_validate({"type": "function", "function": function})
    assert allows(tool.arguments_schema(), good)
    assert not allows(tool.arguments_schema(), bad)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [listing("a"), listing("b")]}, {"anyOf": [listing("c"), {}]}]},
        {"enum": [{"a": 1}]},
    ],
)
def test_an_unevaluatedproperties_that_no_grammar_can_express_is_refused(
    schema: dict[str, Any],
) -> None:
    """Two choices at one place, and whole values, are reported with their place."""
    schema = {"properties": {"p": {**schema, "unevaluatedProperties": False}}}
    with pytest.raises(RequestError, match="`/properties/p/unevaluatedProperties` of `field`"):
        served(schema)


def test_a_schema_of_very_many_names_or_references_stays_open() -> None:
    """The work is bounded: a schema with too many names to compare is enforced as it is."""
    wide = listing(*(f"p{i}" for i in range(1_000)))
    chain = {f"d{i}": {**ref(f"d{i + 1}"), **listing(f"p{i}")} for i in range(100)}
    for schema in (
        {"allOf": [wide, *(listing(f"q{i}") for i in range(100))]},
        {**ref("d0"), "$defs": {**chain, "d100": {}}},
    ):
        assert served(schema) == schema


NAMES = ("a", "b", "c", "d")
LEAVES = st.sampled_from([WHOLE, {"const": "x"}, {"type": "null"}, {"enum": [1, "y"]}])


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw the schema of an object, which may be open, closed or neither."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    schema: dict[str, Any] = {"properties": {name: draw(values) for name in names}}
    if draw(st.booleans()):
        schema["type"] = "object"
    if required := draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=2)):
        schema["required"] = required
    rest = draw(st.sampled_from([None] * 6 + [True, False, WHOLE]))
    if rest is not None:
        schema["additionalProperties"] = rest
    if draw(st.integers(0, 5)) == 0:
        schema["patternProperties"] = {"^[ae]": WHOLE}
    elif draw(st.integers(0, 5)) == 0:
        schema["propertyNames"] = draw(st.sampled_from([{"enum": ["a", "b", 1]}, {"const": "c"}]))
    if draw(st.integers(0, 5)) == 0:
        schema["unevaluatedProperties"] = draw(st.sampled_from([False, True, WHOLE]))
    return schema


REFERENCES = st.sampled_from([ref("A"), ref("B")])
OBJECTS = objects(st.one_of(LEAVES, REFERENCES))
COMPOSITIONS = st.recursive(
    st.one_of(LEAVES, OBJECTS, REFERENCES),
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda base, keyword, parts: {**base, keyword: parts},
            st.one_of(OBJECTS, st.just({})),
            st.sampled_from(["allOf", "anyOf", "oneOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda base, more: {**base, **more}, OBJECTS, REFERENCES),
    ),
    max_leaves=8,
)
# One definition is also part of the other, and neither of itself.
UNIONS = st.builds(
    lambda base, part, keyword: {**base, keyword: [ref("A"), part]},
    OBJECTS,
    st.one_of(OBJECTS, LEAVES),
    st.sampled_from(["allOf", "anyOf"]),
)


def generated(found: LLMatcher, choose: random.Random) -> str | None:
    """Return a text of random allowed bytes; None if it does not end soon."""
    text = b""
    for _ in range(300):
        if found.is_accepting() and (found.is_stopped() or choose.random() < 0.5):
            return text.decode()
        mask = found.compute_logit_bias()
        allowed = [i for i in range(256) if mask[i]]
        # Names of open objects are short, and their values simple.
        usual = [i for i in allowed if chr(i) in '{}[],:"abcdtxy0123456789nul'] or allowed
        if not usual:  # the schema requires endlessly nested objects
            return None
        text += bytes([choose.choice(usual)])
        found.consume_token(text[-1])
    return None


@settings(max_examples=150, deadline=None)
@given(schema=COMPOSITIONS, a=OBJECTS, b=UNIONS, seed=st.integers(0, 2**16))
def test_generated_values_satisfy_the_original_schema(
    schema: dict[str, Any], a: dict[str, Any], b: dict[str, Any], seed: int
) -> None:
    """Closing makes no generable composition empty or invalid."""
    schema = {**schema, "$defs": {"A": a, "B": b}}
    try:
        held = served(schema)
    except RequestError:
        return
    found = matcher_of(held)
    if found.is_error():  # then it also fails without closing
        with patch("tidemill.protocol.constraints.schemas.close_objects"):
            opened = served(schema)
        # The order of definitions decides whether a recursive property in two parts is refused.
        is_circular = "circular" in found.get_error()
        is_held = "unevaluatedProperties" in json.dumps(opened)
        assert is_circular or is_held or matcher_of(opened).is_error()
        return
    text = generated(found, random.Random(seed))
    if text is not None:
        Draft202012Validator(schema).validate(json.loads(text))
