"""Types of arguments: a bare text between tags is parsed to its original value."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter, create_model

from tidemill.engine.parsers.output_parser import ModelOutputParser
from tidemill.engine.parsers.parsed_output import parse_text
from tidemill.engine.parsers.registry import select_parsers
from tidemill.engine.parsers.tagged_calls import ArgumentTypes


class Colour(Enum):
    """A reference to strings."""

    RED = "red"
    TEN = "10"


class Level(IntEnum):
    """A reference to integers."""

    LOW = 1
    HIGH = 2


class Node(BaseModel):
    """A reference to itself."""

    value: int
    next: Node | None = None


class Leaf(BaseModel):
    """A branch of a discriminated union."""

    kind: Literal["leaf"]


class Tree(BaseModel):
    """Another branch of a discriminated union."""

    kind: Literal["tree"]
    parts: list[Annotated[Leaf | Tree, Field(discriminator="kind")]]


TEXTS = ["", "5", "null", "true", "Paris", "[1]", '{"a": 1}', " x ", '"5"', "1e5", "None"]
# Each type with its values; a type that allows any text preserves only texts.
TYPES: list[tuple[Any, list[Any]]] = [
    (int, [5, -1]),
    (int | None, [5, None]),
    (float | None, [2.5, 3, None]),
    (bool | None, [True, False, None]),
    (int | bool | None, [3, True, None]),
    (str, TEXTS),
    (str | None, [None, *(text for text in TEXTS if text != "null")]),
    (str | int, TEXTS),
    (Literal["a", "5"], ["a", "5"]),
    (Literal[1, 2], [1, 2]),
    (Literal["a", 1] | None, ["a", 1, None]),
    (Literal["5", 6] | None, ["5", 6, None]),
    (Colour, ["red", "10"]),
    (Colour | None, ["10", None]),
    (Level, [1, 2]),
    (Level | None, [2, None]),
    (list[int] | None, [[1, 2], [], None]),
    (list[str], [["5", "x"]]),
    (dict[str, int] | None, [{"a": 1}, None]),
    (Node, [{"value": 1, "next": {"value": 2}}]),
    (Node | None, [{"value": 1}, None]),
    (Leaf | Tree, [{"kind": "leaf"}, {"kind": "tree", "parts": [{"kind": "leaf"}]}]),
    (date | int, ["2024-02-29", 5]),
    (Annotated[str, Field(pattern="^[A-Z]{3}$")] | float, ["EUR", 2.5]),
    (Annotated[int, Field(ge=1, le=5)] | None, [3, None]),
    (Decimal, ["x", "2.5"]),
    (Any, TEXTS),
]


def spelled(value: Any) -> str:
    """Return a value as a model writes it between tags."""
    return value if isinstance(value, str) else json.dumps(value)


@given(picks=st.lists(st.sampled_from(TYPES), min_size=1, max_size=4), data=st.data())
def test_values_of_the_types_that_pydantic_writes_come_back(
    picks: list[tuple[Any, list[Any]]], data: st.DataObject
) -> None:
    """The types use `anyOf`, `oneOf`, `enum`, `const` and `$ref`, in both tagged formats."""
    fields: dict[str, Any] = {f"a{i}": (kind, ...) for i, (kind, _) in enumerate(picks)}
    schema = create_model("Arguments", **fields).model_json_schema()
    values = {f"a{i}": data.draw(st.sampled_from(some)) for i, (_, some) in enumerate(picks)}
    coder = "".join(f"<parameter={k}>\n{spelled(v)}\n</parameter>\n" for k, v in values.items())
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{spelled(v)}</arg_value>\n" for k, v in values.items()
    )
    for form, text in (
        ("qwen3_coder", f"<tool_call>\n<function=f>\n{coder}</function>\n</tool_call>"),
        ("glm45", f"<tool_call>f\n{pairs}</tool_call>"),
    ):
        parsers = select_parsers(None, tool_calls=form, reasoning="none")
        [call] = parse_text(
            ModelOutputParser(parsers, "r", tools={"f": schema}).for_choice(0), text
        ).calls
        assert json.loads(call.arguments) == values


def test_nested_elements_have_the_types_of_the_schema() -> None:
    """Items of an array may have any name; an element without text is an empty container."""
    stop = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
    }
    schema = {
        "properties": {
            "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
            "fixed": {"type": ["boolean", "null"]},
            "where": {"$ref": "#/$defs/stop"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object"},
        },
        "$defs": {"stop": stop},
    }
    value = {
        "stops": [{"city": "3", "days": 1.5}, {"city": " Nice", "days": 2}],
        "fixed": None,
        "where": {"city": "", "days": 0},
        "tags": ["1", "null"],
        "more": {},
    }
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>{mark}<invoke name="f">{inner_elements(value, mark)}{mark}</invoke>'
    for tools in ({"f": schema}, {}):  # an unknown function has no types
        parsers = select_parsers(None, tool_calls="minimax_m3", reasoning="none")
        parser = ModelOutputParser(parsers, "r", tools=tools)
        [call] = parse_text(parser.for_choice(0), text).calls
        arguments = json.loads(call.arguments)
        assert (arguments == value) == bool(tools)
        assert arguments["stops"][1]["city"] == " Nice"


def inner_elements(value: dict[str, Any], mark: str) -> str:
    """Return members as elements, as MiniMax-M3 writes them."""
    return "".join(
        f"{mark}<{name}>{inner(part, mark)}{mark}</{name}>" for name, part in value.items()
    )


def inner(value: Any, mark: str) -> str:
    """Return a value between the tags of its element."""
    if isinstance(value, dict):
        return inner_elements(value, mark)
    if isinstance(value, list):
        return "".join(inner_elements({"item": part}, mark) for part in value)
    return spelled(value)


def test_an_optional_integer_is_parsed_as_one() -> None:
    """Every function with a default value has such arguments."""
    schema = TypeAdapter(dict[str, int | None]).json_schema()
    assert ArgumentTypes(schema).json_of("5", "limit") == "5"
    assert ArgumentTypes(schema).json_of("None", "limit") == "null"


@pytest.mark.parametrize(
    "schema",
    [
        {
            "allOf": [{"$ref": "#/$defs/a"}],
            "$defs": {"a": {"properties": {"x": {"type": "integer"}}}},
        },
        {"properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$defs": {"a": {"const": 5}}},
        {"properties": {"x": {"oneOf": [{"type": "null"}, {"type": "number"}]}}},
        {"anyOf": [{"properties": {"x": {"type": "array"}}}, {"properties": {"x": {"enum": [5]}}}]},
    ],
    ids=range(4),
)
def test_a_type_may_be_anywhere_in_a_schema(schema: dict[str, Any]) -> None:
    """It may also be around the properties."""
    assert ArgumentTypes(schema).json_of("5", "x") == "5"
    assert ArgumentTypes(schema).json_of("five", "x") == '"five"'


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": 5},
        {"properties": {"x": "integer"}},
        {"properties": {"x": {"type": 5, "enum": "a", "anyOf": {}, "$ref": 7}}},
        {"properties": {"x": {"type": [["integer"]], "minItems": -1e400, "minLength": "5"}}},
        {"properties": {"x": {"$ref": "#/nowhere"}}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"properties": {"x": {"$ref": "#/properties"}}},
        {"additionalProperties": False, "required": [[]]},
        {"type": "string"},
    ],
    ids=range(10),
)
def test_a_schema_without_types_preserves_a_text(schema: dict[str, Any]) -> None:
    """Tools that are not strict may have any schema."""
    assert ArgumentTypes(schema).json_of("5", "x") == '"5"'


def test_numbers_are_copied_literally() -> None:
    """Digits beyond a float's precision are preserved."""
    types = ArgumentTypes({"properties": {"x": {"type": ["number", "null"]}}})
    assert types.json_of("\n12345678901234567890.50 ", "x") == "12345678901234567890.50"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string", "minLength": 1}, '"exact phrase"', '"exact phrase"'),
        ({"type": "string", "maxLength": 99}, "None", "None"),
        ({"type": ["string", "null"], "pattern": "."}, '"x"', '"x"'),
        ({"type": ["string", "null"], "pattern": "."}, "None", None),
        ({"type": ["string", "integer"], "pattern": "."}, "5", 5),
        ({"type": "string", "enum": ["x"]}, '"x"', "x"),
        ({"type": "boolean"}, "True", True),
    ],
    ids=range(7),
)
def test_quotes_are_part_of_a_text(schema: dict[str, Any], text: str, value: object) -> None:
    """They are removed only if the schema lists the values."""
    types = ArgumentTypes({"type": "object", "properties": {"q": schema}})
    assert json.loads(types.json_of(text, "q")) == value
