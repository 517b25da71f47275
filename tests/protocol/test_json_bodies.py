"""JSON of requests: a body that is far larger in memory than in bytes is refused unparsed."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol import json_bodies
from tidemill.protocol.json_bodies import (
    MAX_CONTAINERS,
    MAX_VALUES,
    TooManyValues,
    check_values,
    load_json,
    unfolded_bytes,
)

VALUES = st.recursive(
    st.text(alphabet='ab,:[]{}"\\\n', max_size=12) | st.integers() | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(alphabet='a,"\\[', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def count(value: Any) -> tuple[int, int]:
    """Return the number of values and keys in a value, including itself, and of containers."""
    if not isinstance(value, (list, dict)):
        return 1, 0
    inside = [count(one) for one in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + keys + sum(n for n, _ in inside), 1 + sum(n for _, n in inside)


@given(VALUES, st.integers(1, 40), st.integers(0, 20), st.sampled_from([1, 2, 7, 2**20]))
def test_values_are_counted_before_they_are_created(
    value: Any, max_values: int, max_containers: int, chunk_bytes: int
) -> None:
    """The count holds for any strings and chunk boundaries; an empty list counts for one more."""
    data = json.dumps(value, ensure_ascii=False).encode()
    num_values, num_containers = count(value)
    num_empty = data.count(b"[]") + data.count(b"{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bodies, "MAX_VALUES", max_values)
        patch.setattr(json_bodies, "MAX_CONTAINERS", max_containers)
        patch.setattr(json_bodies, "_CHUNK_BYTES", chunk_bytes)
        if len(data) > max_containers and (
            num_values > max_values or num_containers > max_containers
        ):
            with pytest.raises(TooManyValues):
                check_values(data)
        elif num_values + num_empty <= max_values:
            assert load_json(data) == value


@given(st.binary(max_size=60), st.sampled_from([1, 3, 2**20]))
def test_any_bytes_are_counted_to_their_end(data: bytes, chunk_bytes: int) -> None:
    """Invalid JSON is left to the parser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bodies, "MAX_VALUES", 2)
        patch.setattr(json_bodies, "MAX_CONTAINERS", 1)
        patch.setattr(json_bodies, "_CHUNK_BYTES", chunk_bytes)
        try:
            check_values(data)
        except TooManyValues as exc:
            assert "more than" in str(exc)  # noqa: PT017 - it may also pass


def test_a_million_token_ids_are_accepted() -> None:
    """Text full of commas and quotes, and audio in base64, are accepted too."""
    ids = b'{"prompt":[' + b",".join([b"12345"] * 1_000_000) + b"]}"
    assert len(load_json(ids)["prompt"]) == 1_000_000
    for text in ("1,2," * 1_000_000, 'a "b", [c]' * 400_000, "QUJD" * 7_000_000):
        assert load_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" + b"[]," * MAX_CONTAINERS + b"[]]", "65,536 lists and objects"),
        (b"[" + b"{}," * MAX_CONTAINERS + b"{}]", "65,536 lists and objects"),
        (b"[" + b"1," * MAX_VALUES + b"1]", "2,097,152 values and keys"),
        (b"{" + b'"":1,' * (MAX_VALUES // 2) + b'"":1}', "2,097,152 values and keys"),
    ],
)
def test_a_body_that_is_far_too_large_is_refused(data: bytes, words: str) -> None:
    """The message has the limit."""
    with pytest.raises(TooManyValues, match=f"^has more than {words}$"):
        load_json(data)


def test_the_memory_of_json_is_estimated_without_its_strings() -> None:
    """It is about that of its values: thirty times its bytes, or nothing next to them."""
    hollow = b"[" + b"[]," * 60_000 + b"1]"
    made = load_json(hollow)
    taken = sys.getsizeof(made) + sum(map(sys.getsizeof, made))
    assert taken / 2 < unfolded_bytes(hollow) < 4 * taken
    text = json.dumps({"prompt": "1,2," * 100_000}).encode()
    assert unfolded_bytes(text) < 1_000
    assert unfolded_bytes(b"") == 0
