"""Structural tags as masks: free text is allowed, and the content of a tag matches its format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.structured_output.constrained import GRAMMARS, constraint_of, lets_through
from tidemill.protocol.constraints.structural_tags import served_tag
from tidemill.protocol.errors import RequestError

NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": NUMBER}
CALLS = {
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    """Return a tag."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**flags: bool) -> dict[str, Any]:
    """Return text with tags of two kinds."""
    tags = [
        tag("<a>", {"type": "regex", "pattern": "[0-9]+"}, "</a>"),
        tag("<b>", {"type": "any_text"}, "</b>"),
    ]
    return {"format": {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": tags, **flags}}


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (
            CALLS,
            ["", "Hi.", 'So: <f=a>{"n": 1}</f> and <f=b>null</f>!', "<f", "a < b"],
            ["<f=", "<f=c>", '<f=a>{"n": "1"}</f>', '<f=a>{"n": 1}', "x <f=b>null</f><f=b>1</f>"],
        ),
        (
            triggered(),
            ["", "x", "<a>12</a>", "<b>x <a y</b> <a>1</a> z"],
            ["<a>x</a>", "<b>x", "<a"],
        ),
        (
            triggered(at_least_one=True),
            ["<a>12</a>", "<b></b> y <a>1</a> z"],
            ["", "x", "x <a>12</a>", "<a> <a>12</a>", " <a>12</a>"],
        ),
        (triggered(stop_after_first=True), ["", "x", "x <a>12</a>"], ["<a>1</a> x", "<a>x</a>"]),
        (
            triggered(at_least_one=True, stop_after_first=True),
            ["<a>12</a>", "<b>x</b>"],
            ["", "x", "x <a>12</a>", "<a>1</a> x"],
        ),
        ({"format": SCHEMA}, ['{"n": 1}'], ["{}", ""]),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        tag("<think>", {"type": "any_text"}, "</think>"),
                        {"type": "const_string", "value": "\n\n"},
                        {
                            "type": "or",
                            "elements": [
                                SCHEMA,
                                {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'},
                            ],
                        },
                    ],
                }
            },
            ["<think>a < b</think>\n\n((x))", '<think></think>\n\n{"n":2}'],
            ["<think></think>{}", "((x))", "<think></think>\n\n(x"],
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "any_text"}, {"type": "regex", "pattern": "a/b|c"}],
                }
            },
            ["c", "xxa/b", "cc"],
            ["", "cx"],
        ),
        (
            {
                "format": {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "tags": [tag("[", {"type": "regex", "pattern": "x+"}, "]")],
                }
            },
            ["", "[x]", "[x], [xx]"],
            ["[x],[x]", "[x], ", "[]"],
        ),
        (
            {
                "format": {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "at_least_one": True,
                    "stop_after_first": True,
                    "tags": [tag("[", {"type": "grammar", "grammar": "start: /x+/"}, "]")],
                }
            },
            ["[x]"],
            ["", "[x], [x]"],
        ),
    ],
    ids=range(10),
)
def test_the_content_of_tags_matches_their_format(
    source: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """The rest of the text is as free as the format allows."""
    wanted = constraint_of("structural_tag", served_tag(source, "field"))
    assert [text for text in good if not lets_through(wanted, text)] == []
    assert [text for text in bad if lets_through(wanted, text)] == []


def test_json_in_a_tag_has_the_requested_whitespace() -> None:
    """The same applies to a schema alone."""
    tree = served_tag({"format": SCHEMA}, "field")
    assert not lets_through(constraint_of("structural_tag", tree), '{"n":\n\n1}')
    assert lets_through(constraint_of("structural_tag", tree, ""), '{"n":1}')
    assert not lets_through(constraint_of("structural_tag", tree, ""), '{"n": 1}')


@pytest.mark.parametrize(
    "content",
    [
        {"type": "regex", "pattern": "(a"},
        {"type": "regex", "pattern": "a" * 10_001},
        {"type": "grammar", "grammar": "root ::= y"},
        {"type": "grammar", "grammar": "start: y"},
        {"type": "grammar", "grammar": "start: " + '"a" ' * 10_000},
    ],
    ids=range(5),
)
def test_an_invalid_content_is_a_400(content: dict[str, Any]) -> None:
    """The error is the same as without a tag."""
    tree = served_tag({"format": tag("<a>", content, "</a>")}, "field")
    with pytest.raises(RequestError) as caught:
        GRAMMARS.constraint(constraint_of("structural_tag", tree))
    assert caught.value.code == "invalid_constraint"
