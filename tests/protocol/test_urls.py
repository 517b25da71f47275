"""Urls that hold what they bring: base64, read in pieces."""

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
from tidemill.protocol.urls import inline_bytes


def read(text: str) -> bytes | None:
    """Return what a text in base64 holds, or None for none."""
    try:
        return inline_bytes(f"data:;base64,{text}", "a thing")
    except ValueError:
        return None


@given(st.binary(max_size=60), st.integers(1, 9), st.sampled_from(["", " ", "\n\t"]))
def test_pieces_say_what_the_whole_does(data: bytes, size: int, space: str) -> None:
    """Wherever it is cut, and with white space anywhere."""
    text = space.join(b64encode(data).decode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_PIECE_CHARS", size)
        assert read(text) == data


@given(st.text("AQ= /", max_size=24), st.integers(1, 9))
def test_what_is_no_base64_is_none_in_pieces_either(text: str, size: int) -> None:
    """As where all of it is read at once, strictly: Python's own takes surplus padding."""
    joined, expected = "".join(text.split()), None
    if re.fullmatch(r"([AQ/]{4})*([AQ/]{2}==|[AQ/]{3}=)?", joined):
        with suppress(NotBase64):
            expected = a2b_base64(joined, strict_mode=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_PIECE_CHARS", size)
        assert read(text) == expected
