"""Stop patterns: where a match ends, whatever comes between, and in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine.text.stop_patterns import StopPattern
from tidemill.protocol.errors import RequestError


def first_end(pattern: str, data: bytes, size: int = 1) -> int | None:
    """Return after how many bytes a match has ended, read so many at a time."""
    search = StopPattern(pattern).search()
    for start in range(0, len(data), size):
        if search.push(data[start : start + size]):
            return min(start + size, len(data))
    return None


@pytest.mark.parametrize(
    ("pattern", "text", "end"),
    [
        (r"\d{3}", "12 1234", 6),
        (r"ab|cd", "xcdab", 3),
        (r"a.b", "a\nb aéb", 8),
        (r"(?i)end", "The END", 7),
        (r"\n\n", "one\n\ntwo", 5),
        (r"x/y", "x/y", 3),
        (r"[à-ü]+!", "où!", 4),
        (r"z", "abc", None),
    ],
)
def test_a_text_ends_where_a_match_does(pattern: str, text: str, end: int | None) -> None:
    """With the first byte after which some part of the text is a match."""
    assert first_end(pattern, text.encode()) == end


@given(st.text(alphabet="ab1\n", max_size=40), st.integers(1, 7))
def test_what_is_found_is_what_re_finds(text: str, size: int) -> None:
    """The shortest beginning of a text that ends with a match, in whatever pieces it comes."""
    pattern = r"a+b|1[ab]{2}"
    wanted = re.compile(f"(?:{pattern})$(?!\n)")
    ends = [end for end in range(len(text) + 1) if wanted.search(text[:end])]
    found = first_end(pattern, text.encode(), size)
    expected = -(-ends[0] // size) * size if ends else None
    assert found == (None if expected is None else min(expected, len(text)))


def test_bytes_that_are_no_text_are_searched_as_they_are_shown() -> None:
    """They come out as U+FFFD, and what follows is found all the same."""
    assert first_end("ab", b"a\xffb ab") == 6
    assert first_end("�a", b"\xe2\x82a") == 3


def test_a_pattern_takes_time_that_grows_with_the_text_alone() -> None:
    """One that backtracks without end elsewhere is searched through 30,000 bytes."""
    assert first_end("(a+)+b", b"a" * 30_000 + b"c", 100) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "unclosed group"),
        ("(?=a)b", "look-around"),
        ("^a", "lookarounds not supported"),
        (r"(a)\1", "backreferences"),
        ("a*", "matches the empty text"),
        ("[", "unclosed character class"),
    ],
)
def test_what_cannot_be_searched_for_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    """Before anything runs."""
    with pytest.raises(RequestError, match=reason) as caught:
        StopPattern(pattern)
    assert caught.value.param == "stop_regex"


def test_a_text_may_take_a_pattern_too_far() -> None:
    """Its states grow with what is read: that is a fault of the pattern, told by name."""
    with pytest.raises(RequestError, match="too many states") as caught:
        first_end("(.{1,500}){1,500}z", b"abc" * 1_000)
    assert caught.value.param == "stop_regex"
