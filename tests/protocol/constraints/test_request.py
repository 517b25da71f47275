"""Output constraints of a body: every form of it is parsed to one value, or to one error."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest

from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.constraints.request import (
    JSON_WHITESPACE,
    MAX_SOURCE_CHARS,
    ConstrainedRequest,
    OutputConstraint,
    asks_for_automaton,
)
from tidemill.protocol.constraints.schemas import served_schema
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fields import GenerationRequest
from tidemill.protocol.requests import read_body

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps({**SCHEMA, "additionalProperties": False}, separators=(",", ":"))
SCALAR = '{"type":"any_text"}'
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def constraint_of(**fields: Any) -> OutputConstraint | None:
    """Return the constraint of a chat's output, which is the same as a completion's."""
    of_chat = read_body(ChatCompletionRequest, {**CHAT, **fields}).output_constraint
    assert read_body(CompletionRequest, {"prompt": "Hi", **fields}).output_constraint == of_chat
    return of_chat


def fault(**fields: Any) -> RequestError:
    """Return the error for a chat, before any model is loaded."""
    with pytest.raises(RequestError) as caught:
        constraint_of(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        (
            {"response_format": {"type": "json_object"}},
            "json_schema",
            '{"type":"object"}',
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            TEXT,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            TEXT,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            '{"type":"object"}',
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "é", "a"]}},
            "choice",
            '["a","é"]',
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"grammar": "x"}}, "grammar", "x", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"structural_tag": f'{{"format": {SCALAR}}}'}},
            "structural_tag",
            SCALAR,
            "structured_outputs.structural_tag",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            SCALAR,
            "response_format",
        ),
        (
            {"structural_tag": {"format": {"type": "any_text"}}},
            "structural_tag",
            SCALAR,
            "structural_tag",
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]', "guided_choice"),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/", "guided_grammar"),
        ({"json_schema": TEXT}, "json_schema", TEXT, "json_schema"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "root ::= x"}, "grammar", "root ::= x", "ebnf"),
        ({"grammar": "root ::= x"}, "grammar", "root ::= x", "grammar"),
    ],
)
def test_every_form_is_parsed_to_one_value(
    fields: dict[str, Any], kind: str, source: str, param: str
) -> None:
    """Its `param` is the field to change."""
    found = constraint_of(**fields)
    assert found is not None
    assert (found.kind, found.source, found.param) == (kind, source, param)
    assert found.whitespace == JSON_WHITESPACE


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None, "guided_json": None, "regex": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "disable_any_whitespace": True}},
        {"guided_decoding_backend": "outlines"},
        {"guided_whitespace_pattern": " "},
    ],
)
def test_empty_fields_give_no_constraint(fields: dict[str, Any]) -> None:
    """They are null, or the defaults that clients write out."""
    assert constraint_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "whitespace"),
    [
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ""),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, " ?"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "\\n"}, "\\n"),
    ],
)
def test_white_space_follows_the_request(fields: dict[str, Any], whitespace: str) -> None:
    """It is allowed between the tokens of a JSON text."""
    found = constraint_of(**fields)
    assert found is not None
    assert found.whitespace == whitespace


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
def test_two_constraints_are_refused(fields: dict[str, Any], param: str) -> None:
    """The error names both."""
    error = fault(**fields)
    assert error.param == param
    assert "cannot be used together" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": "start: /a/", "structured_outputs": {"grammar": "start: /a/"}},
        {"grammar": "x", "ebnf": "x", "structured_outputs": {"grammar": "x", "json": None}},
        {"guided_json": SCHEMA, "structured_outputs": {"json": TEXT}},
        {"regex": "a", "structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        {"guided_choice": ["a"], "structured_outputs": {"choice": ["a", "a"]}},
    ],
)
def test_the_old_and_the_new_name_of_one_constraint_are_allowed(fields: dict[str, Any]) -> None:
    """Clients that support servers of several versions send both; errors name the first."""
    first = next(iter(found for name in fields if (found := constraint_of(**{name: fields[name]}))))
    found = constraint_of(**fields)
    assert found is not None
    assert found.is_same_form(first)


def test_equal_schemas_with_different_white_space_are_refused() -> None:
    """It is ambiguous which of them is meant."""
    error = fault(
        guided_json=SCHEMA, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}
    )
    assert "cannot be used together" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice.1"),
        ({"guided_choice": ["a"] * 10_001}, "guided_choice"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": []}, "json_schema"),
        ({"json_schema": False}, "json_schema"),
        ({"json_schema": {"const": float("nan")}}, "json_schema"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema"),
        ({"json_schema": json.dumps({"const": "x" * 10_000_000})}, "json_schema"),
        ({"json_schema": {"const": "x" * MAX_SOURCE_CHARS}}, "json_schema"),
        ({"regex": "a" * (MAX_SOURCE_CHARS + 1)}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"ebnf": ["x"]}, "ebnf"),
        ({"guided_regex": "[a-z]+\\"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a\\\\\\"}}, "structured_outputs.regex"),
    ],
    ids=range(25),
)
def test_an_invalid_form_is_a_400_with_its_field(fields: dict[str, Any], param: str) -> None:
    """The value may be anything of any size."""
    error = fault(**fields)
    assert (error.param, error.status_code) == (param, 400)


def test_strict_allows_no_unknown_keyword() -> None:
    """OpenAI's strict mode refuses unknown keywords; the constraint is the same without it."""

    def of(schema: dict[str, Any], *, strict: bool) -> OutputConstraint | None:
        described = {"name": "x", "schema": schema, "strict": strict}
        return constraint_of(response_format={"type": "json_schema", "json_schema": described})

    assert of(SCHEMA, strict=True) == of(SCHEMA, strict=False)
    assert of({"maxlength": 3}, strict=False) is not None
    with pytest.raises(RequestError, match="maxlength"):
        of({"maxlength": 3}, strict=True)
    closed = constraint_of(
        structured_outputs={"json": SCHEMA, "disable_additional_properties": True}
    )
    assert closed == constraint_of(structured_outputs={"json": SCHEMA})


def test_a_schema_shared_by_rows_is_parsed_once() -> None:
    """Rows of a file have equal schemas, as objects or as texts."""
    schema = {**SCHEMA, "required": ["parsed once"]}
    with patch("tidemill.protocol.constraints.request.served_schema", wraps=served_schema) as parse:
        assert constraint_of(guided_json=schema) == constraint_of(guided_json=json.dumps(schema))
    assert parse.call_count == 1


def test_every_field_of_a_constraint_is_known_to_be_compiled() -> None:
    """None of them may be compiled on an event loop."""
    own = ConstrainedRequest.model_fields.keys() - GenerationRequest.model_fields.keys()
    for name in {*own, "tools", "stop_regex"} - {"guided_whitespace_pattern", "confidence"}:
        assert asks_for_automaton({name: {}}), name
    assert not asks_for_automaton({"messages": [], "regex": None, "temperature": 0})
