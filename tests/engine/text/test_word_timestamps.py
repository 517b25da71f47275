"""Words, created from tokens and their times."""

from __future__ import annotations

import pytest

from tidemill.engine.text.word_timestamps import word_timestamps


def words(*pieces: str | bytes, has_spaces: bool = True) -> list[tuple[str, float, float]]:
    """Return the words of tokens that each take a second."""
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    times = [(float(i), i + 1.0) for i in range(len(data))]
    result = word_timestamps(data, times, has_spaces=has_spaces)
    return [(word.text, word.start, word.end) for word in result]


def test_a_word_begins_at_a_space() -> None:
    """A word takes the time of all its tokens."""
    assert words(" Tide", "mill", " runs") == [(" Tidemill", 0, 2), (" runs", 2, 3)]
    assert words("Tide", "mill") == [("Tidemill", 0, 2)]
    assert words() == []


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((" Well", ",", " yes", "."), [(" Well,", 0, 1), (" yes.", 2, 3)]),
        ((" he", " went", ' "', "no", '."'), [(" he", 0, 1), (" went", 1, 2), (' "no."', 2, 4)]),
        ((" (", "a", ")"), [(" (a)", 0, 2)]),
        ((" what", "?", "!"), [(" what?!", 0, 1)]),
        ((" a", " -", " b"), [(" a", 0, 1), (" - b", 2, 3)]),
        ((".", " a"), [(".", 0, 1), (" a", 1, 2)]),
        ((" a", " "), [(" a", 0, 1)]),
    ],
)
def test_punctuation_joins_its_word(
    pieces: tuple[str, ...], expected: list[tuple[str, float, float]]
) -> None:
    """Opening punctuation joins the next word; without a space it starts that word."""
    assert words(*pieces) == expected


def test_a_language_without_spaces_has_character_words() -> None:
    """A word has as many characters as one token; punctuation joins words here, too."""
    assert words("今日", "は", "、", "雨", "。", has_spaces=False) == [
        ("今日", 0, 1),
        ("は、", 1, 2),
        ("雨。", 3, 4),
    ]


def test_a_character_may_take_several_tokens() -> None:
    """It is complete only once all of its bytes have arrived."""
    rain = "雨".encode()
    assert words(rain[:1], rain[1:2], rain[2:] + "。".encode(), has_spaces=False) == [
        ("雨。", 0, 3)
    ]
    assert words(b" caf", b"\xc3", b"\xa9", b" au") == [(" café", 0, 3), (" au", 3, 4)]


def test_invalid_utf8_is_marked() -> None:
    """They may be in the middle or cut off at the end; nothing after them is lost."""
    assert words(b" a", b"\xff", b" b", b"\xc3") == [(" a\ufffd", 0, 2), (" b\ufffd", 2, 4)]
