"""Structural tags: both forms give one tree; unsupported parts are reported with their place."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.constraints.structural_tags import MAX_FORMATS, served_tag
from tidemill.protocol.errors import RequestError

CALL = {"begin": "<f=a>", "schema": {"type": "object", "title": "T"}, "end": "</f>"}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}


def test_the_older_form_is_text_with_triggered_tags() -> None:
    """SGLang and older vLLM use structures and triggers."""
    assert served_tag({"structures": [CALL], "triggers": ["<f="]}, "field") == {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "type": "tag",
                "begin": "<f=a>",
                "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                "end": "</f>",
            }
        ],
        "at_least_one": False,
        "stop_after_first": False,
    }


def test_the_newer_form_is_a_tree_of_formats() -> None:
    """It is XGrammar's; additional fields are ignored."""
    tree = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "x", "note": 1},
            {"type": "or", "elements": [{"type": "regex", "pattern": "a"}, {"type": "any_text"}]},
            {"type": "grammar", "grammar": 'root ::= "a"'},
            {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": True},
        ],
    }
    served = served_tag({"type": "structural_tag", "format": tree}, "field")
    const, either, grammar, tags = served["elements"]
    assert const == {"type": "const_string", "value": "x"}
    assert [one["type"] for one in either["elements"]] == ["regex", "any_text"]
    assert grammar == {"type": "grammar", "grammar": 'root ::= "a"'}
    assert tags == {
        "type": "tags_with_separator",
        "tags": [TAG],
        "separator": ",",
        "at_least_one": True,
        "stop_after_first": False,
    }


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([], ""),
        ({}, "/format"),
        ({"format": {"type": "qwen_xml_parameter"}}, "/format/type"),
        ({"format": {"type": ["or"]}}, "/format/type"),
        ({"format": {"type": "const_string"}}, "/format/value"),
        ({"format": {"type": "const_string", "value": ""}}, "/format/value"),
        ({"format": {"type": "json_schema"}}, "/format/json_schema"),
        ({"format": {"type": "any_text", "excludes": ["x"]}}, "/format/excludes"),
        ({"format": {"type": "sequence", "elements": []}}, "/format/elements"),
        ({"format": {"type": "or", "elements": [5]}}, "/format/elements/0"),
        ({"format": {"type": "tag", "begin": "a"}}, "/format/content"),
        ({"format": {**TAG, "end": 5}}, "/format/end"),
        ({"structures": [CALL]}, "/triggers"),
        ({"structures": [CALL], "triggers": [""]}, "/triggers"),
        ({"structures": [CALL], "triggers": ["<g"]}, "/tags/0/begin"),
        ({"structures": [], "triggers": ["<f"]}, "/structures"),
        (
            {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "tags": [TAG, {"type": "const_string", "value": "<x"}],
                }
            },
            "/format/tags/1/type",
        ),
        (
            {"structures": [{**CALL, "schema": None}], "triggers": ["<f"]},
            "/tags/0/content/json_schema",
        ),
        ({"format": {"type": "or", "elements": [TAG] * MAX_FORMATS}}, None),
        ({"format": {"type": "regex", "pattern": "a\\"}}, "/format/pattern"),
    ],
    ids=range(20),
)
def test_an_unsupported_part_of_a_tag_is_reported_with_its_place(
    value: Any, place: str | None
) -> None:
    """The place is a JSON pointer into the value as it was sent."""
    with pytest.raises(RequestError) as caught:
        served_tag(value, "field")
    assert (caught.value.param, caught.value.status_code) == ("field", 400)
    if place is not None:
        named = f"`{place}` of `field` " if place else "`field` "
        assert caught.value.message.startswith(named), caught.value.message


def test_a_schema_inside_a_tag_follows_the_same_rules() -> None:
    """The error has the place inside the schema."""
    with pytest.raises(RequestError, match="`/not` of `field`"):
        served_tag({"structures": [{**CALL, "schema": {"not": {}}}], "triggers": ["<f"]}, "field")


def test_an_endless_tree_is_refused() -> None:
    """Its formats are counted as they are read."""
    tree: dict[str, Any] = {"type": "any_text"}
    for _ in range(300):
        tree = {"type": "sequence", "elements": [tree]}
    with pytest.raises(RequestError, match="too many"):
        served_tag({"format": tree}, "field")
