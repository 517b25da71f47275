"""JSON that is printed in parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from tidemill.protocol import json_printing
from tidemill.protocol.json_printing import discard, has_more_values, print_json

VALUES = st.recursive(
    st.text(max_size=3) | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(VALUES, st.integers(1, 12), st.sampled_from(["null", "constants"]))
def test_parts_are_the_json_of_the_whole(value: Any, part_values: int, mode: str) -> None:
    """The split and the options of a row do not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_printing, "_PART_VALUES", part_values)
        patch.setattr(json_printing, "_CHARS", 1)
        assert print_json(value, inf_nan_mode=mode) == to_json(value, inf_nan_mode=mode)


@pytest.mark.parametrize("shape", ["chat", "completion", "vectors", "vocabulary"])
def test_a_long_reply_is_printed_in_short_parts(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No printer call gets more than some thousand values, which take a few milliseconds."""
    token = {"token": "a", "logprob": -1.0, "bytes": [97]}
    answers: dict[str, Any] = {
        "chat": {"choices": [{"logprobs": {"content": [token | {"top": [token] * 20}] * 500}}] * 4},
        "completion": {"choices": [{"logprobs": {"top": [{"a": 1.0, "b": 2.0}] * 9_000}}]},
        "vectors": {"data": [{"embedding": [0.5] * 1_024}] * 200},
        "vocabulary": {"choices": [{"logprobs": {"content": [{"top": [token] * 20_000}]}}]},
    }
    answer, sizes = answers[shape], list[int]()

    def print_and_count(value: object, **options: Any) -> bytes:
        sizes.append(_num_values(value))
        return to_json(value, **options)

    monkeypatch.setattr(json_printing, "to_json", print_and_count)
    assert print_json(answer) == to_json(answer)
    assert max(sizes) <= 6_000
    assert has_more_values(answer, 10_000)
    assert not has_more_values({"choices": [{"logprobs": None}]}, 10)


def test_a_discarded_reply_is_empty_down_to_its_tokens() -> None:
    """Its memory is free while a client still reads the printed bytes."""
    content = [{"token": "a"}]
    body = {"choices": [{"logprobs": {"content": content}}], "usage": None}
    discard(body)
    assert (body, content) == ({}, [])


def _num_values(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_num_values, inside))
