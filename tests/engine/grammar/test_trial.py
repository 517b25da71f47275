"""Grammars that take too long to compile are found out in a process that ends with them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

import engine.grammar.grammars as module
from engine.grammar.trial import Trial, compiles_in_time
from engine.protocol.errors import RequestError
from tests.engine.grammar.held import GRAMMARS, asked

ENDLESS = {"type": "integer", "multipleOf": 9_999_991}


def grammar_of(schema: object) -> str:
    """Return a schema in llguidance's form."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


@pytest.fixture
def trial() -> Iterator[Trial]:
    """Return one that gives each grammar a part of a second."""
    trial = Trial(seconds=0.2)
    yield trial
    trial.close()


def test_what_takes_too_long_ends_its_process_alone(trial: Trial) -> None:
    """The next one is tried in another; what is wrong with a grammar is not said here."""
    assert trial.ends(grammar_of({"type": "string", "pattern": "^a+$"}))
    assert not trial.ends(grammar_of(ENDLESS))
    assert trial.ends(grammar_of({"type": "integer", "multipleOf": 12}))
    assert trial.ends("this is no grammar")


def test_only_what_may_take_long_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns, multiples, terminals that are joined, and what is long."""
    tried: list[str] = []
    monkeypatch.setattr(Trial, "ends", lambda _, grammar: bool(tried.append(grammar)) or True)
    tame = grammar_of({"type": "object", "properties": {"a": {"type": "string"}}})
    wild = [
        grammar_of({"patternProperties": {"a": {}}}),
        grammar_of(ENDLESS),
        LLMatcher.grammar_from_lark("start: T\nT: /a+/ & /b*a/"),
        grammar_of({"enum": ["x" * 30_000]}),
    ]
    assert all(map(compiles_in_time, [tame, *wild]))
    assert tried == wild


def test_a_request_for_such_a_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the field that asked for it; what was made before is not tried again."""
    monkeypatch.setattr(module, "compiles_in_time", lambda _: True)
    known, unknown = asked("regex", "trial(a|b)"), asked("regex", "another")
    GRAMMARS.constraint(known)
    monkeypatch.setattr(module, "compiles_in_time", lambda _: False)
    GRAMMARS.constraint(known)
    with pytest.raises(RequestError, match="seconds to compile") as caught:
        GRAMMARS.constraint(unknown)
    assert (caught.value.param, caught.value.code) == (unknown.param, "invalid_constraint")
