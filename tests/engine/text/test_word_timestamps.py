"""Words, cut from tokens and their times."""

from __future__ import annotations

import pytest

from tidemill.engine.text.word_timestamps import word_timestamps


def words(*pieces: str | bytes, has_spaces: bool = True) -> list[tuple[str, float, float]]:
    """Return the words of tokens that each take a second."""
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    times = [(float(i), i + 1.0) for i in range(len(data))]
    found = word_timestamps(data, times, has_spaces=has_spaces)
    return [(word.text, word.start, word.end) for word in found]


def test_a_word_begins_at_a_space() -> None:
    """And takes the time of all its tokens."""
    assert words(" Tide", "mill", " runs") == [(" Tidemill", 0, 2), (" runs", 2, 3)]
    assert words("Tide", "mill") == [("Tidemill", 0, 2)]
    assert words() == []


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((" Well", ",", " yes", "."), [(" Well,", 0, 1), (" yes.", 2, 3)]),
        ((" he", " said", ' "', "no", '."'), [(" he", 0, 1), (" said", 1, 2), (' "no."', 2, 4)]),
        ((" (", "a", ")"), [(" (a)", 0, 2)]),
        ((" what", "?", "!"), [(" what?!", 0, 1)]),
        ((" a", " -", " b"), [(" a", 0, 1), (" - b", 2, 3)]),
        ((".", " a"), [(".", 0, 1), (" a", 1, 2)]),
        ((" a", " "), [(" a", 0, 1)]),
    ],
)
def test_punctuation_joins_the_word_that_it_stands_at(
    pieces: tuple[str, ...], expected: list[tuple[str, float, float]]
) -> None:
    """What opens at the word behind it, whose beginning it is without a space between them."""
    assert words(*pieces) == expected


def test_a_language_without_spaces_has_words_of_characters() -> None:
    """As many as one token brought; punctuation joins them, too."""
    assert words("今日", "は", "、", "雨", "。", has_spaces=False) == [
        ("今日", 0, 1),
        ("は、", 1, 2),
        ("雨。", 3, 4),
    ]


def test_a_character_may_take_several_tokens() -> None:
    """It is one only when all of its bytes are there."""
    rain = "雨".encode()
    assert words(rain[:1], rain[1:2], rain[2:] + "。".encode(), has_spaces=False) == [
        ("雨。", 0, 3)
    ]
    assert words(b" caf", b"\xc3", b"\xa9", b" au") == [(" café", 0, 3), (" au", 3, 4)]


def test_bytes_that_are_no_text_are_marked() -> None:
    """In the middle or cut off at the end; nothing is lost behind them."""
    assert words(b" a", b"\xff", b" b", b"\xc3") == [(" a\ufffd", 0, 2), (" b\ufffd", 2, 4)]
