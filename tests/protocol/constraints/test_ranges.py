"""Numeric ranges: bounds that are not exact floats, or exceed 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from tests.engine.structured_output.constrained import constraint_of
from tidemill.engine.structured_output.grammar_backend import grammar_of
from tidemill.protocol.constraints.ranges import BOUNDS, LARGEST
from tidemill.protocol.constraints.schemas import SchemaRules, served_schema
from tidemill.protocol.errors import RequestError

TOKENS = LLTokenizer("byte")
POINTS = [0, 2**53, 2**53 + 1, 10**17, 10**18 - 1, 10**18, 2**60 + 1, 2**62, LARGEST, 2**63, 1e300]


def lets_through(schema: dict[str, Any], value: int) -> bool:
    """Say whether the grammar of an enforced schema accepts an integer."""
    text = str(value).encode()
    matcher = LLMatcher(TOKENS, grammar_of(constraint_of("json_schema", schema)), log_level=0)
    if matcher.is_error():  # for small bounds the library itself reports an empty range
        assert "Unsatisfiable" in matcher.get_error()
        return False
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def served(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the enforced schema."""
    return served_schema(schema, "field", SchemaRules())


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        (
            {"minimum": -(2**63), "maximum": 2**63 - 1},
            [0, -LARGEST, LARGEST],
            [2**63, -(2**63) - 1],
        ),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 10**18, LARGEST], [-1, 2**64]),
        ({"minimum": -3.4e38, "maximum": 3.4e38}, [-1, 5], []),
        ({"minimum": 10**18 + 7}, [2 * 10**18], [10**18 + 6, 10**17]),
        ({"exclusiveMaximum": -(10**18)}, [-2 * 10**18], [-(10**18), 0]),
        ({"exclusiveMinimum": 10**17}, [10**17 + 16], [10**17]),
        ({"maximum": 2**53 + 3}, [2**53 + 2], [2**53 + 4]),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_ranges_of_64_bits_and_more_are_enforced(
    kind: str, bounds: dict[str, float], good: list[int], bad: list[int]
) -> None:
    """Schemas generated from other languages' integers and floats have them."""
    schema = served({"type": kind, **bounds})
    assert [value for value in good if not lets_through(schema, value)] == []
    assert [value for value in bad if lets_through(schema, value)] == []


def test_enforceable_bounds_stay_unchanged() -> None:
    """Bounds of non-integers stay too."""
    for bounds in ({"minimum": -5, "maximum": 2.5}, {"exclusiveMaximum": 2**53 - 1}):
        assert served(bounds) == bounds


@given(
    kind=st.sampled_from(["integer", "number"]),
    bounds=st.dictionaries(
        st.sampled_from(BOUNDS),
        st.builds(
            lambda sign, point: sign * point, st.sampled_from([1, -1]), st.sampled_from(POINTS)
        ),
        min_size=1,
    ),
    near=st.integers(-600, 600),
)
def test_accepted_numbers_are_in_range(kind: str, bounds: dict[str, float], near: int) -> None:
    """A range without any number is refused, whatever the bounds."""
    schema = {"type": kind, **bounds}
    try:
        held = served(schema)
    except RequestError as exc:
        assert any(f"`/{keyword}`" in exc.message for keyword in bounds)  # noqa: PT017
        return
    judge = Draft202012Validator(schema)
    for bound in bounds.values():
        for value in (int(bound), int(bound) - 1, int(bound) + 1, int(bound) + near):
            assert judge.is_valid(value) or not lets_through(held, value)
