"""Look-ahead in patterns: real ones, random ones against another implementation, and limits."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.engine.structured_output.constrained import constraint_of
from tidemill.engine.structured_output.grammar import grammar_of
from tidemill.protocol.constraints.look_ahead import (
    LookAroundError,
    looks_around,
    plain_patterns,
    plain_texts,
)
from tidemill.protocol.constraints.schemas import SchemaRules, served_schema
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import check_request

TOKENS = LLTokenizer("byte")
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
PASSWORD = r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?=.*[@$!%*?&])[A-Za-z\d@$!%*?&]{8,}$"
IPV4 = r"^(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?!$)|$)){4}$"
EXAMPLES = {
    "zod's e-mail": (ZOD_EMAIL, ["a.b@c.de"], [".a@c.de", "a..b@c.de", "a@c"]),
    "pydantic's Decimal": (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["-1.5", "007"], ["-.", "", "1e5"]),
    "pydantic's Decimal of 5 digits": (
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*)$",
        ["123.450", "12"],
        ["1234", "1.234", "+"],
    ),
    "a password": (PASSWORD, ["aB3$efgh"], ["aB3$efg", "ab3$efgh", "aB3defgh"]),
    "a password without anchors": (r"(?=.*[A-Z])(?=.*\d).{8,}", ["Abcdefg1"], ["abcdefg1", "A1"]),
    "an IPv4 address": (IPV4, ["192.168.0.1", "1.2.3.4"], ["1.2.3.4.", "1.2.3", "256.1.1.1"]),
    "a social security number": (
        r"^(?!0{3}|666|9\d{2})\d{3}-(?!00)\d{2}-(?!0{4})\d{4}$",
        ["123-45-6789"],
        ["666-45-6789", "123-00-6789", "123-45-0000"],
    ),
    "a host name": (
        r"^((?!-)[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,6}$",
        ["a-b.example.com"],
        ["-a.com", "a.-b.com", "com"],
    ),
    "a slug": (r"^(?:(?!--)[a-z0-9-])+$", ["a-b-c", "x"], ["a--b", ""]),
    "a comment": (r"^/\*(?:(?!\*/)[\s\S])*\*/$", ["/* a * b */", "/**/"], ["/* */ */", "/*/"]),
    "a reserved word": (r"^(?!(?:if|else)$)[a-z]+$", ["iffy", "elsewhere"], ["if", "else"]),
}


def lets_through(kind: Any, source: Any, text: str) -> bool:
    """Say whether a grammar accepts a text."""
    matcher = LLMatcher(TOKENS, grammar_of(constraint_of(kind, source)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("pattern", "good", "bad"), EXAMPLES.values(), ids=EXAMPLES)
def test_patterns_of_other_tools_are_enforced(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    """A schema, an object's names, a regex and a tag accept exactly the right texts."""
    schema = served_schema({"type": "string", "pattern": pattern}, "field", SchemaRules())
    named = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    is_large = pattern == PASSWORD  # too large for a single expression, which a name needs
    names = {} if is_large else served_schema(named, "field", SchemaRules())
    tag = {"type": "regex", "pattern": pattern}
    for text in (*good, *bad):
        assert regex.search(pattern, text) is not None or text in bad
        is_good = text in good
        assert lets_through("json_schema", schema, json.dumps(text)) == is_good, text
        assert lets_through("json_schema", names, json.dumps({text: 1})) == (is_good or is_large)
        assert lets_through("regex", pattern, text) == is_good, text
        assert lets_through("structural_tag", tag, text) == is_good, text


def expressions() -> st.SearchStrategy[str]:
    """Return expressions of a few characters, with look-ahead in any supported place."""
    plain = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", "a*", "b?", "a+", "b{2}"])

    def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        texts = st.lists(inner, max_size=3).map("".join)
        ways = st.one_of(texts, st.tuples(texts, texts).map("|".join))
        forms = st.sampled_from(["(?:{})", "(?:{})*", "(?:{}){{2}}", "(?={})", "(?!{})", "(?!{}$)"])
        return st.tuples(forms, ways).map(lambda each: each[0].format(each[1]))

    body = st.lists(st.recursive(plain, longer, max_leaves=5), min_size=1, max_size=4).map("".join)
    return st.tuples(st.sampled_from(["^", ""]), body, st.sampled_from(["$", ""])).map("".join)


TEXTS = ["".join(each) for length in range(4) for each in product("ab1.", repeat=length)]


@given(expressions().filter(looks_around))
def test_plain_expressions_match_the_same_texts(pattern: str) -> None:
    """Another implementation finds the same texts, or more if there is no anchor."""
    try:
        found = plain_patterns(pattern)
    except LookAroundError as exc:
        found = ("(?!)",) if "every text" in str(exc) else ()
    if found:
        is_anchored = pattern.startswith("^") and "|" not in pattern
        for text in TEXTS:
            has_match = all(regex.search(each, text) for each in found)
            if is_anchored or has_match:
                assert has_match == bool(regex.search(pattern, text)), (pattern, found, text)
    try:
        whole = plain_texts(pattern)
    except LookAroundError:
        return
    for text in TEXTS:
        has_match = all(regex.fullmatch(each, text) for each in whole)
        assert has_match == bool(regex.fullmatch(pattern, text)), (pattern, whole, text)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(?<=b)c", "look-behind is not supported"),
        ("a(?<!b)c", "look-behind is not supported"),
        (r"^(?!.*(.)\1)a+$", "back-references are not supported"),
        ("^(?:(?!ab).){9}$", "look-ahead in a repetition of more than 8 times is not supported"),
        ("^(?:(?=a))*$", "is nested too deeply"),
        ("^(?=(?i)a)a$", "flags are not supported next to look-ahead"),
        ("^(?!)a$", "its look-ahead excludes every text"),
        ("^(?=a", "missing closing parenthesis"),
        (r"^(?=\p{L})a$", r"\p is not supported next to look-ahead"),
        (f"^(?!{'a?' * 300}b)(?:.*c)?$", "its look-ahead"),
        (f"^(?!{'.*a' * 40}.{{900}}b).*c$", "its look-ahead"),
        ("^" + "(?=" * 60 + ")" * 60, "more than 50 nested groups are not supported"),
    ],
)
def test_unsupported_look_around_is_one_line_with_its_place(pattern: str, words: str) -> None:
    """The error has the JSON pointer, the pattern as it was sent, and the reason."""
    schema = {"properties": {"a/b": {"type": "string", "pattern": pattern}}}
    message = {"role": "user", "content": "x"}
    for field, place in (
        ({"guided_json": schema}, "`/properties/a~1b/pattern` of `guided_json` is "),
        ({"regex": pattern}, "`regex` is "),
    ):
        body: dict[str, Any] = {"messages": [message], **field}
        with pytest.raises(RequestError) as caught:
            check_request("/v1/chat/completions", body, None)
        assert caught.value.message.startswith(place + repr(pattern)[:20])
        assert words in caught.value.message
        assert "\n" not in caught.value.message
    names = {"patternProperties": {pattern: {}}}
    with pytest.raises(RequestError, match=r"^`/patternProperties/"):
        served_schema(names, "field", SchemaRules())


def test_distinct_patterns_with_look_ahead_are_limited() -> None:
    """A schema may repeat a pattern any number of times, but not have very many different ones."""
    same = {"items": [{"pattern": "^(?!a)b"}] * 100}
    assert len(served_schema(same, "field", SchemaRules())["items"]) == 100
    many = {"items": [{"pattern": f"^(?!{number})b"} for number in range(100)]}
    with pytest.raises(RequestError, match=r"^`/items/32/pattern` of `field` is one of more than"):
        served_schema(many, "field", SchemaRules())


def test_a_pattern_without_look_around_stays_unchanged() -> None:
    """Escapes, classes and comments with the same characters are not look-around."""
    for pattern in (r"^\(?=a$", "[(?=a)]", r"[\](?!]", "(?:a)", "(?<name>a)", r"\\b", "(?P<n>a)"):
        assert not looks_around(pattern)
        assert served_schema({"pattern": pattern}, "x", SchemaRules()) == {"pattern": pattern}
