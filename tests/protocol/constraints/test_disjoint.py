"""Disjointness: which `oneOf` equals an `anyOf`, and which cannot be proved to."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ConfigDict, Discriminator, TypeAdapter

from tests.engine.structured_output.constrained import constraint_of
from tidemill.engine.structured_output.grammar_backend import grammar_of
from tidemill.protocol.constraints.disjoint import Disjointness, Overlap
from tidemill.protocol.constraints.schema_facts import SchemaFacts
from tidemill.protocol.constraints.schemas import SchemaRules, served_schema
from tidemill.protocol.errors import RequestError

TOKENS = LLTokenizer("byte")


class Cat(BaseModel):
    """A branch with a constant."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """A branch with two constants."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog", "wolf"]
    puppies: list[Pet]


Pet = Annotated[Cat | Dog, Discriminator("kind")]
Dog.model_rebuild()


def ref(name: str) -> dict[str, Any]:
    """Return a reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


def tagged(*values: object, name: str = "t", **others: Any) -> dict[str, Any]:
    """Return the schema of objects with a discriminator that has these values."""
    return {
        "type": "object",
        "properties": {name: {"enum": list(values)}, **others},
        "required": [name],
    }


def served(schema: dict[str, Any], rules: SchemaRules | None = None) -> dict[str, Any]:
    """Return the enforced schema."""
    return served_schema(schema, "field", rules or SchemaRules())


def lets_through(schema: dict[str, Any], value: object) -> bool:
    """Say whether the grammar of an enforced schema accepts a value."""
    text = json.dumps(value).encode()
    matcher = LLMatcher(TOKENS, grammar_of(constraint_of("json_schema", schema)), log_level=0)
    assert not matcher.is_error(), (schema, matcher.get_error())
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def overlap(*ways: object, **root: Any) -> tuple[int, int] | None:
    """Return the pair of a `oneOf` that may overlap."""
    schema = {"oneOf": list(ways), **root}
    try:
        Disjointness(schema).disjoint(schema)
    except Overlap as exc:
        return exc.first, exc.second
    return None


def test_pydantics_unions_are_enforced() -> None:
    """Discriminators are in references and nested, and a union contains itself."""
    schema = TypeAdapter(list[Pet]).json_schema()
    held = served(schema)
    cat = {"kind": "cat", "lives": 9}
    for pets in ([], [cat], [{"kind": "wolf", "puppies": [cat, {"kind": "dog", "puppies": []}]}]):
        assert lets_through(held, pets)
    for others in ([{"kind": "cow"}], [{"kind": "cat", "puppies": []}], [{"kind": "dog"}]):
        assert not lets_through(held, others)


@pytest.mark.parametrize(
    "ways",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
        [{"type": ["string", "null"]}, {"type": ["array", "boolean"]}],
        [{"const": True}, {"const": 1}, {"const": "1"}, {"const": None}],
        [{"enum": ["a", 1]}, {"enum": ["b", 2]}],
        [{"type": "number", "maximum": 0}, {"type": "integer", "exclusiveMinimum": 0}],
        [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
        [tagged("a"), tagged("b", "c"), {"type": "null"}],
        [tagged(1), tagged("1")],
        [ref("a"), ref("b")],
        [{"allOf": [ref("a")]}, {"allOf": [{"type": "object"}, ref("b")]}],
        [ref("a"), {"anyOf": [ref("b"), {"type": "null"}]}],
        [{"oneOf": [ref("a"), {"type": "null"}]}, {"oneOf": [ref("b"), {"const": 5}]}],
        [tagged("a", x={"const": 1}), {**tagged("a"), "properties": {"t": {"const": "b"}}}],
        [
            {"properties": {"x": tagged("a")}, "required": ["x"], "type": "object"},
            {"properties": {"x": tagged("b")}, "required": ["x"], "type": "object"},
        ],
        [
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
            {"type": "object", "required": ["b"]},
        ],
        [
            {"type": "array", "prefixItems": [{"const": "add"}, {}], "minItems": 2},
            {"type": "array", "prefixItems": [{"const": "neg"}], "minItems": 1},
        ],
        [{"const": {"t": "a"}}, tagged("b")],
        [{"const": [1]}, {"type": "array", "items": {"type": "string"}}],
        [False, True],
        [tagged("a"), True, False][:1],
    ],
    ids=range(20),
)
def test_mutually_exclusive_schemas_are_disjoint(ways: list[Any]) -> None:
    """They differ by type, value, bound or required member, in any spelling."""
    defs = {"a": tagged("a"), "b": tagged("b"), "c": ref("a")}
    assert overlap(*ways, **{"$defs": defs}) is None


def test_siblings_of_a_choice_count_for_each_of_its_schemas() -> None:
    """Some schemas require the discriminator once for all."""
    ways = [{"properties": {"t": {"const": "a"}}}, {"properties": {"t": {"const": "b"}}}]
    assert overlap(*ways) == (0, 1)
    assert overlap(*ways, type="object", required=["t"]) is None
    held = served({"type": "object", "required": ["t"], "oneOf": ways})
    assert lets_through(held, {"t": "b"})
    assert not lets_through(held, {"t": "c"})


def test_a_discriminator_with_a_default_is_always_generated() -> None:
    """Pydantic requires it in input, though not in the schema that it writes."""

    class Ship(BaseModel):
        kind: Literal["ship"] = "ship"
        masts: int = 1

    class Car(BaseModel):
        kind: Literal["car"] = "car"
        wheels: int = 4

    kinds = TypeAdapter(Annotated[Ship | Car, Discriminator("kind")] | None)
    held = served(kinds.json_schema())
    good: list[Any] = [{"kind": "ship"}, {"kind": "car", "wheels": 3}, None]
    assert [value for value in good if not lets_through(held, value)] == []
    bad: list[Any] = [{"masts": 1}, {"kind": "bike"}, {}]
    assert [value for value in bad if lets_through(held, value)] == []
    assert [kinds.validate_python(value) is None for value in good] == [False, False, True]


def test_an_already_disjoint_schema_stays_unchanged() -> None:
    """An optional discriminator is not required if it is not needed."""
    flag = {"type": "object", "properties": {"flag": {"type": "boolean"}}}
    for ways in ([flag, {"type": "string"}], [flag, tagged("a"), {"type": "null"}][::2]):
        held = served({"oneOf": ways})["oneOf"]
        assert [way.get("required") for way in held] == [way.get("required") for way in ways]


def test_expressions_whose_discriminators_have_defaults_may_contain_themselves() -> None:
    """Members are required only in copies of the definitions, which stay unchanged otherwise."""
    number = {"type": "object", "properties": {"t": {"const": "n"}, "v": {"type": "number"}}}
    added = {
        "type": "object",
        "properties": {"t": {"const": "+"}, "left": ref("E"), "right": ref("E")},
        "required": ["left", "right"],
    }
    for way in ({"allOf": [ref("N")]}, ref("N")):
        schema = {
            "type": "object",
            "properties": {"all": ref("E"), "one": ref("N")},
            "$defs": {"E": {"oneOf": [way, ref("A")]}, "N": number, "A": added},
        }
        held = served(schema)
        leaf = {"t": "n", "v": 1}
        assert lets_through(held, {"all": {"t": "+", "left": leaf, "right": leaf}})
        assert lets_through(held, {"one": {"v": 1}})
        assert not lets_through(held, {"all": {"t": "+", "left": leaf, "right": {"v": 1}}})
        assert not lets_through(held, {"all": {**leaf, "w": 1}})


def test_a_schema_may_be_one_of_its_choices() -> None:
    """Its copy is among its definitions, next to others of any name, and contains none itself."""
    schema = {
        "type": "object",
        "properties": {
            "t": {"const": "a"},
            "next": {"oneOf": [ref("disjoint-1"), {"$ref": "#"}, {"type": "null"}]},
        },
        "$defs": {"disjoint-1": {"type": "object", "properties": {"t": {"const": "b"}}}},
    }
    held = served(schema)
    for good in ({"t": "a", "next": {"t": "a", "next": {"t": "b"}}}, {"next": None}, {}):
        assert lets_through(held, good)
    for bad in ({"next": {}}, {"next": {"t": "c"}}, {"t": "b"}, {"t": "a", "next": {"next": {}}}):
        assert not lets_through(held, bad)


@pytest.mark.parametrize("is_closed", [True, False])
def test_only_one_of_mutually_exclusive_members_is_generated(*, is_closed: bool) -> None:
    """If each schema requires a different member, a value has only one of them."""
    members = {name: {"type": "integer"} for name in "abc"}
    ways = [{"required": [name]} for name in "abc"]
    schema = {"type": "object", "properties": members, "oneOf": ways}
    held = served(schema if not is_closed else {**schema, "additionalProperties": False})
    for name in "abc":
        assert lets_through(held, {name: 1})
    for value in ({}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}):
        assert not lets_through(held, value)


@pytest.mark.parametrize(
    ("ways", "pair"),
    [
        ([{"type": "null"}, {"type": "integer"}, {"type": "number"}], (1, 2)),
        ([tagged("a"), tagged("b"), tagged("c", "a")], (0, 2)),
        ([tagged("a"), {"type": "object", "properties": {"t": {"type": "string"}}}], (0, 1)),
        ([tagged("a"), {**tagged("a", name="s"), "required": ["s", "t"]}], (0, 1)),
        ([{"required": ["a"]}, {"required": ["b"]}], (0, 1)),
        ([{"const": 1}, {"const": 1.0}], (0, 1)),
        ([{}, {"type": "null"}], (0, 1)),
        ([ref("nowhere"), {"type": "null"}], (0, 1)),
        ([ref("loop"), {"type": "null"}], (0, 1)),
        ([{"$ref": "#a"}, {"type": "null"}], (0, 1)),
        (
            [{"type": "array", "items": {"const": 1}}, {"type": "array", "items": {"const": 2}}],
            (0, 1),
        ),
    ],
    ids=range(11),
)
def test_an_overlapping_pair_is_reported(ways: list[Any], pair: tuple[int, int]) -> None:
    """Dangling references are reported too, because nothing is known about them."""
    defs = {"loop": {"$ref": "#/$defs/pool"}, "pool": {"$ref": "#/$defs/loop"}}
    assert overlap(*ways, **{"$defs": defs}) == pair


def test_an_overlapping_choice_is_reported_with_place_reason_and_advice() -> None:
    """The place is the pointer of its keyword."""
    with pytest.raises(RequestError) as caught:
        served({"properties": {"pet": {"oneOf": [tagged("a"), tagged("b"), tagged("a")]}}})
    assert caught.value.message == (
        "`/properties/pet/oneOf` of `field` is not supported, because a value may satisfy both 0"
        " and 2 of it: give each a required property with a different `const`, or use `anyOf` if"
        " any match is enough."
    )


def test_references_under_another_base_are_not_followed() -> None:
    """With a nested `$id`, `#` means that part, so references are ambiguous."""
    schema = {"oneOf": [ref("a"), ref("b")], "$defs": {"a": tagged("a"), "b": tagged("b")}}
    assert served(schema)
    with pytest.raises(RequestError, match="oneOf"):
        served({"items": {"$id": "http://example.com/x", **schema}, "$defs": schema["$defs"]})


def test_closing_objects_makes_no_schemas_disjoint() -> None:
    """The original schema decides, in which the objects are open."""
    ways: list[Any] = [
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "properties": {"b": {}}, "required": ["b"]},
    ]
    with pytest.raises(RequestError, match="oneOf"):
        served({"oneOf": ways})


def hostile() -> dict[str, dict[str, Any]]:
    """Return schemas that would take ages if each path through them were followed."""

    def chain(link: Any, length: int) -> dict[str, Any]:
        defs = {f"d{i}": link(ref(f"d{i + 1}")) for i in range(length)}
        return {"oneOf": [ref("d0"), ref("e")], "$defs": {**defs, "e": {"type": "null"}}}

    wide = {"type": "object", "required": [f"p{i}" for i in range(100)]}
    return {
        "references": chain(lambda link: link, 10_000),
        "unions": chain(lambda link: {"anyOf": [link, link]}, 500),
        "joined": chain(lambda link: {"allOf": [link, {"properties": {"a": {}}}]}, 500),
        "members": {
            "oneOf": [ref("a"), ref("b")],
            "$defs": {
                name: {**wide, "properties": {one: ref(name) for one in wide["required"]}}
                for name in ("a", "b")
            },
        },
        "pairs": {"oneOf": [{"type": "string"}] * 1_000},
        "values": {"oneOf": [{"enum": [*range(9_000), i]} for i in range(9_000, 9_012)]},
        "bounds": {"oneOf": [{"minLength": i, "maxLength": i} for i in range(100)]},
        "cycle": {"oneOf": [ref("a"), ref("a")], "$defs": {"a": {"oneOf": [ref("a"), ref("a")]}}},
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_schemas_need_a_bounded_number_of_steps(name: str) -> None:
    """Schemas that are not proved by then are refused; recursion is never deep."""
    schema = hostile()[name]
    disjointness = Disjointness(schema)
    with pytest.raises(Overlap):
        disjointness.disjoint(schema)
    assert disjointness._facts.work < 150_000


SCALARS = [None, True, 0, 1, 2.5, "a", "b"]
VALUES: list[Any] = [
    *SCALARS,
    *([], [0], ["a"], ["a", 1], {}, {"a": {"a": "b"}}, {"a": []}),
    *({"a": value} for value in SCALARS),
    *({"a": value, "b": other} for value in ("a", "b", 1) for other in (0, "a")),
]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)},
        optional={
            "type": st.just("object"),
            "required": st.lists(st.sampled_from("ab"), unique=True),
            "additionalProperties": st.booleans() | inner,
        },
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("array"),
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "items": inner,
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(1, 2),
        },
    )


LEAVES = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(TYPES)),
    st.builds(lambda value: {"const": value}, st.sampled_from(VALUES)),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(SCALARS), min_size=1)),
    st.builds(lambda low: {"minimum": low}, st.integers(0, 2)),
    st.builds(lambda high: {"type": "number", "exclusiveMaximum": high}, st.integers(0, 2)),
    st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from("xy")),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.builds(
            lambda word, ways: {word: ways},
            st.sampled_from(["anyOf", "allOf", "oneOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=8,
)


@given(ways=st.lists(SCHEMAS, min_size=2, max_size=3), x=SCHEMAS, y=LEAVES, sibling=SCHEMAS)
def test_proved_schemas_are_disjoint(ways: list[Any], x: Any, y: Any, sibling: Any) -> None:
    """According to jsonschema, no value of any kind satisfies two of them and their siblings."""
    # A definition that only refers to itself is left out: jsonschema would not terminate.
    defs = {"x": x if "$ref" not in json.dumps(x) else {"type": "object"}, "y": y}
    defs["y"] = y if "$ref" not in json.dumps(y) else {"const": "a"}
    schema = {"oneOf": ways, "allOf": [sibling], "$defs": defs}
    disjointness = Disjointness(schema)
    try:
        ways = disjointness.disjoint(schema)
    except Overlap:
        return
    disjointness.fill()
    judges = [Draft202012Validator({"allOf": [way, sibling], "$defs": defs}) for way in ways]
    judge = Draft202012Validator(schema)
    for value in VALUES:
        held = sum(judge.is_valid(value) for judge in judges)
        assert held == 0 or (held == 1 and judge.is_valid(value)), value


@given(
    names=st.lists(st.sampled_from("abcd"), min_size=2, max_size=4, unique=True),
    inner=st.lists(st.sampled_from(TYPES[:5]), min_size=4, max_size=4),
    value=st.sampled_from([None, True, 3, "x"]),
    by=st.sampled_from(["const", "enum", "ref"]),
)
def test_a_discriminated_union_accepts_the_same_values_as_jsonschema(
    names: list[str], inner: list[str], value: object, by: str
) -> None:
    """The values belong to each branch, or to none."""
    defs: dict[str, Any] = {f"is_{name}": {"const": name} for name in names}
    for name, kind in zip(names, inner, strict=False):
        signs = {"const": {"const": name}, "enum": {"enum": [name, name * 2]}}
        defs[name] = {
            **tagged(name, v={"type": kind}, next=ref("U")),
            "required": ["t", "v"],
            "additionalProperties": False,
        }
        defs[name]["properties"]["t"] = signs.get(by, ref(f"is_{name}"))
    defs["U"] = {"oneOf": [ref(name) for name in names], "discriminator": {"propertyName": "t"}}
    schema = {**ref("U"), "$defs": defs}
    held, judge = served(schema), Draft202012Validator(schema)
    for name in "abcd":
        one = {"t": name, "v": value}
        for sample in (one, {"t": name}, {"t": name * 2, "v": value}, {**one, "next": one}):
            assert lets_through(held, sample) == judge.is_valid(sample), sample


def test_unions_of_many_values_are_not_copied() -> None:
    """A set for each would copy the large one again and again; the shared part is stored once."""
    large = {"enum": [*range(100_000)]}
    ways = [{"anyOf": [{"$ref": "#/$defs/B"}, {"const": -i}]} for i in range(1, 5)]
    meets = [{"allOf": [{"$ref": "#/$defs/B"}, {"minimum": i, "enum": [i, -i]}]} for i in (1, 2)]
    facts = SchemaFacts({"$defs": {"B": large}})
    assert [facts.infer(way)["number"].values for way in ways] == [None] * 4
    assert [facts.infer(way)["number"].values for way in meets] == [
        frozenset([i, -i]) for i in (1, 2)
    ]
    both = facts.infer({"allOf": [large, {"enum": [*range(50_000)]}]})["number"].values
    assert both is facts.infer(large)["number"].values
