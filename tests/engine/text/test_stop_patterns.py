"""Stop patterns: where a match ends, for any text before it, and in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine.text.stop_patterns import StopPattern
from tidemill.protocol.errors import RequestError


def first_end(pattern: str, data: bytes, size: int = 1) -> int | None:
    """Return the number of bytes after which a match ends, reading `size` bytes at a time."""
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
def test_a_text_ends_where_a_match_ends(pattern: str, text: str, end: int | None) -> None:
    """The end is the first byte after which some part of the text is a match."""
    assert first_end(pattern, text.encode()) == end


@given(st.text(alphabet="ab1\n", max_size=40), st.integers(1, 7))
def test_matches_equal_those_of_re(text: str, size: int) -> None:
    """The result is the shortest prefix that ends with a match, however the text is split."""
    pattern = r"a+b|1[ab]{2}"
    wanted = re.compile(f"(?:{pattern})$(?!\n)")
    ends = [end for end in range(len(text) + 1) if wanted.search(text[:end])]
    end = first_end(pattern, text.encode(), size)
    expected = -(-ends[0] // size) * size if ends else None
    assert end == (None if expected is None else min(expected, len(text)))


def test_invalid_utf8_is_searched_as_replacement_characters() -> None:
    """Such bytes become U+FFFD, and matches after them are found."""
    assert first_end("ab", b"a\xffb ab") == 6
    assert first_end("�a", b"\xe2\x82a") == 3


def test_a_pattern_takes_linear_time() -> None:
    """A pattern that backtracks endlessly elsewhere is searched for in 30,000 bytes."""
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
def test_an_unsupported_pattern_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    """It is refused before anything runs."""
    with pytest.raises(RequestError, match=reason) as caught:
        StopPattern(pattern)
    assert caught.value.param == "stop_regex"


def test_a_pattern_with_too_many_states_is_an_error() -> None:
    """Its states grow with the text; the error names the pattern."""
    with pytest.raises(RequestError, match="too many states") as caught:
        first_end("(.{1,500}){1,500}z", b"abc" * 1_000)
    assert caught.value.param == "stop_regex"
