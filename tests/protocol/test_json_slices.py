"""Large JSON that is parsed in slices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from tidemill.protocol import json_bodies, json_slices
from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.json_slices import load_in_slices

TEXTS = st.text(alphabet='ab,:[]{}"\\/\n\x00é\u2028😀', max_size=30)
VALUES = st.recursive(
    TEXTS | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)
EDITS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(0, 3),
        st.sampled_from([b"", *(bytes([mark]) for mark in b',:[]{}"\\ \n1x\xff\x01'), b"\\ud83d"]),
    ),
    max_size=2,
)
SLICES = st.sampled_from([12, 13, 16, 24, 40, 2**18])


def outcome(load: Any, data: bytes) -> str:
    """Return a parser's result for some bytes: the value with its types, or an error."""
    try:
        return repr(load(data))
    except ValueError:
        return "refused"


@given(VALUES, st.booleans(), st.sampled_from([None, 1]), EDITS, SLICES)
def test_slices_parse_to_the_value_of_the_whole(
    value: Any,
    is_ascii: bool,  # noqa: FBT001 - drawn by the test
    indent: int | None,
    edits: list[tuple[int, int, bytes]],
    slice_bytes: int,
) -> None:
    """Both parsers refuse damaged JSON or neither does, wherever slices end."""
    data = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    for place, length, inserted in edits:
        data = data[:place] + inserted + data[place + length :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_slices, "_SLICE_BYTES", slice_bytes)
        assert outcome(load_in_slices, data) == outcome(from_json, data)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("depth", [200, 201])
def test_slices_are_nested_as_deep_as_the_whole(opening: bytes, depth: int) -> None:
    """One container more is refused."""
    closing = b"]" if opening == b"[" else b"}"
    data = opening * depth + b"1" + closing * depth
    assert outcome(load_in_slices, data) == outcome(from_json, data)


@pytest.mark.parametrize(
    "data",
    [
        b'["' + b"a" * 3_000_000 + b'"]',
        b'["' + rb"\u00e9\ud83d\ude00" * 200_000 + b'"]',
        b'["' + "aé😀".encode() * 400_000 + b'"]',
        b"[" + b"1," * 1_000_000 + b"1]",
        b"[" + b'"a", ' * 500_000 + b"1]",
        b"{" + b",".join(b'"k%d":0' % number for number in range(200_000)) + b"}",
        b"[" + b",".join([b'{"role":"user","content":"Hi"}'] * 50_000) + b"]",
        b'{"messages":[' + b",".join([b'{"a":[{"b":"c"}]}'] * 20_000) + b" " * 2_000_000 + b"]}",
    ],
    ids=["text", "escapes", "characters", "numbers", "strings", "keys", "objects", "nested"],
)
def test_no_call_of_the_parser_gets_more_than_a_slice(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call holds the GIL until it returns, so its bytes are limited."""
    sizes: list[int] = []

    def parse_and_count(part: bytes, **options: Any) -> Any:
        sizes.append(len(part))
        return from_json(part, **options)

    monkeypatch.setattr(json_slices, "from_json", parse_and_count)
    monkeypatch.setattr(json_bodies, "from_json", parse_and_count)
    assert load_json(data, in_slices=True) == from_json(data)
    assert max(sizes) <= json_slices._SLICE_BYTES + 2


def test_an_error_in_a_slice_has_its_place_in_the_whole() -> None:
    """Line and column are those of the whole text."""
    data = b'{"a": [\n' + b'  "x",\n' * 200_000 + b'  "y" "z"]}'
    with pytest.raises(ValueError, match=r"expected `,` or `\]` at line 200002 column 7$"):
        load_json(data, in_slices=True)
    with pytest.raises(ValueError, match=r"at line 200002 column 7$"):
        from_json(data)
