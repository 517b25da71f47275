"""Verdicts on texts: whether they satisfy a constraint, according to judges without masks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.structured_output.constrained import constraint_of
from tidemill.engine.structured_output import verify as verify_module
from tidemill.engine.structured_output.verify import verify
from tidemill.protocol.constraints.request import Kind, OutputConstraint

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "on": {"type": "string", "format": "date"}},
    "required": ["age"],
}


@pytest.mark.parametrize(
    ("kind", "source", "text", "why"),
    [
        ("json_schema", PERSON, '{"age": 3, "on": "2026-01-31"}', None),
        ("json_schema", PERSON, '{"age": "3"}', "$.age: '3' is not of type 'integer'"),
        ("json_schema", PERSON, '{"age": 3, "on": "soon"}', "date"),
        ("json_schema", PERSON, '{"age": 3', "not valid JSON"),
        ("json_schema", PERSON, "[" * 100_000, "not valid JSON"),
        ("json_schema", {"type": "string", "pattern": "^a+$"}, '"aa"', None),
        ("json_schema", {"type": "string", "pattern": "^a+$"}, '"ab"', "does not match"),
        ("regex", "a+", "aa", None),
        ("regex", "a+", "aab", "not match the whole"),
        ("choice", ["a", "b"], "b", None),
        ("choice", ["a", "b"], "c", "not one of the choices"),
        ("lark", 'start: "a" start?', "aaa", None),
        ("lark", 'start: "a" start?', "ab", "does not match the grammar"),
        ("grammar", 'root ::= w " " w{2,3} x{1,}\nw ::= [a-z ]\nx ::= "x"{2} | ', "a bcx", None),
        ("grammar", 'root ::= "(" root ")" | "é" | ', "((é))", None),
        ("grammar", 'root ::= "(" root ")" | "é" | ', "((é)", "does not match the grammar"),
    ],
    ids=range(16),
)
def test_a_text_is_valid_or_the_verdict_explains_why_not(
    kind: Kind, source: Any, text: str, why: str | None
) -> None:
    """The explanation is the judge's own message."""
    verdict = verify(text, constraint_of(kind, source))
    assert verdict.holds == (why is None)
    assert (verdict.why is None) == (why is None)
    assert why is None or why in (verdict.why or "")


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("regex", r"\x{41}[a&&b", "A"),
        ("lark", "start: %json {}", "{}"),
        ("grammar", "root ::= y", "y"),
        ("grammar", 'root ::= "a"*', "a" * 2_001),
        ("json_schema", {"type": "object", "minimum": "x"}, "{}"),
        ("json_schema", {"type": "string", "pattern": "("}, '"a"'),
        ("structural_tag", {"type": "any_text"}, "x"),
    ],
    ids=range(7),
)
def test_an_unreadable_source_has_no_verdict(kind: Kind, source: Any, text: str) -> None:
    """It is neither valid nor invalid, and never fails the row."""
    verdict = verify(text, constraint_of(kind, source))
    assert verdict.holds is None
    assert verdict.why


def test_no_expression_runs_without_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expressions of bodies and schemas have a time limit, after which there is no verdict."""
    monkeypatch.setattr(verify_module, "_MOST_SECONDS", 0.02)
    text = "a" * 60 + "!"
    for wanted, text_ in (
        (constraint_of("regex", "(a|aa|a)+b"), text),
        (constraint_of("json_schema", {"pattern": "^(a|aa|a)+b$"}), f'"{text}"'),
    ):
        verdict = verify(text_, wanted)
        assert verdict.holds is None
        assert "Timeout" in (verdict.why or "")


def test_the_schema_that_was_sent_is_the_one_judged() -> None:
    """Changes that were made to it for masks do not matter."""
    sent = {"type": "integer", "minimum": 5}
    lost = replace(constraint_of("json_schema", {"type": "integer"}), sent=sent)
    assert verify("3", lost).holds is False
    assert verify("3", replace(lost, sent='{"type": "integer"}')).holds


def test_references_that_double_are_followed_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forty of them would lead to 2^40 checks; such a text has no verdict."""
    monkeypatch.setattr(verify_module, "_MOST_SECONDS", 0.05)
    twice = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    schema = {"$defs": {**twice, "a40": {"type": "string"}}, "$ref": "#/$defs/a0"}
    assert verify('"a"', OutputConstraint("json_schema", json.dumps(schema), "regex")).holds is None


def test_a_number_beyond_the_range_of_the_judge_has_no_verdict() -> None:
    """Python treats it as infinite; the resulting error is not a verdict."""
    schema = OutputConstraint("json_schema", json.dumps({"multipleOf": 0.01}), "regex")
    assert verify("1e400", schema).holds is None
