"""Data URLs: base64 content, decoded in pieces."""

from __future__ import annotations

import re
from base64 import b64encode
from binascii import Error as NotBase64
from binascii import a2b_base64
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol import urls as module
from tidemill.protocol.urls import inline_bytes, inline_head


def read(text: str) -> bytes | None:
    """Return the decoded content, or None for invalid base64."""
    try:
        return inline_bytes(f"data:;base64,{text}", "a thing")
    except ValueError:
        return None


@given(st.binary(max_size=60), st.integers(1, 9), st.sampled_from(["", " ", "\n\t"]))
def test_pieces_decode_to_the_same_bytes(data: bytes, size: int, space: str) -> None:
    """The split does not matter, and white space may be anywhere."""
    text = space.join(b64encode(data).decode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_PIECE_CHARS", size)
        assert read(text) == data


@given(st.text("AQ= /", max_size=24), st.integers(1, 9))
def test_invalid_base64_is_invalid_in_pieces_too(text: str, size: int) -> None:
    """Strict decoding of the whole agrees; Python's own decoder accepts surplus padding."""
    joined, expected = "".join(text.split()), None
    if re.fullmatch(r"([AQ/]{4})*([AQ/]{2}==|[AQ/]{3}=)?", joined):
        with suppress(NotBase64):
            expected = a2b_base64(joined, strict_mode=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_PIECE_CHARS", size)
        assert read(text) == expected


@pytest.mark.parametrize("size", [0, 1, 50, 5_000])
@pytest.mark.parametrize("space", ["", "\n"])
def test_the_head_of_a_data_url_is_the_start_of_its_data(size: int, space: str) -> None:
    """White space may be anywhere."""
    data = bytes(range(250)) * 20
    text = space.join(b64encode(data[:size]).decode())
    head = inline_head(f"data:image/png;base64,{text}")
    assert data.startswith(head)
    assert len(head) >= min(size - size % 3, 48)
