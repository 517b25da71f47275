"""Word timestamps from token timestamps, split and merged as in openai-whisper.

A word begins where a token begins with a space; a token of punctuation is a word of its own, which
is merged into its neighbour without its time. In languages without spaces each character is a word,
or all those of one token.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

# Punctuation before a word, and behind one.
_OPENING = frozenset("\"'“¿([{-")
_CLOSING = frozenset("\"'.。,，!！?？:：”)]}、")  # noqa: RUF001 - punctuation of other scripts

Times = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Word:
    """A spoken word from `start` to `end`, in seconds; `text` has the space before it."""

    text: str
    start: float
    end: float


def word_timestamps(
    pieces: Sequence[bytes], times: Sequence[Times], *, has_spaces: bool
) -> tuple[Word, ...]:
    """Return the words of a text whose tokens have the bytes `pieces`, each with its times."""
    words = _characters(pieces, times)
    if has_spaces:
        words = _between_spaces(words)
    return tuple(word for word in _with_punctuation(words) if word.text.strip())


def _characters(pieces: Sequence[bytes], times: Sequence[Times]) -> list[Word]:
    """Return the texts of the fewest tokens each that make up whole characters."""
    found: list[Word] = []
    held, start = b"", 0.0
    for i, (piece, (begins, ends)) in enumerate(zip(pieces, times, strict=True)):
        start = start if held else begins
        held += piece
        is_last = i == len(pieces) - 1
        try:
            text = held.decode("utf-8", "replace" if is_last else "strict")
        except UnicodeDecodeError as exc:
            if exc.reason == "unexpected end of data":
                continue  # the rest of a character comes with the next token
            text = held.decode("utf-8", "replace")
        found.append(Word(text, start, ends))
        held = b""
    return found


def _between_spaces(parts: Sequence[Word]) -> list[Word]:
    words: list[Word] = []
    for part in parts:
        is_punctuation = all(char in string.punctuation for char in part.text.strip())
        if words and not part.text.startswith(" ") and not is_punctuation:
            last = words[-1]
            words[-1] = Word(last.text + part.text, last.start, part.end)
        else:
            words.append(part)
    return words


def _with_punctuation(words: Sequence[Word]) -> list[Word]:
    """Merge opening punctuation into the next word, all other into the word before it."""
    joined: list[Word] = []
    for word in reversed(words):
        mark = word.text.strip()
        if joined and word.text.startswith(" ") and mark and _OPENING.issuperset(mark):
            following = joined[-1]
            joined[-1] = Word(word.text + following.text, following.start, following.end)
        else:
            joined.append(word)
    words, joined = joined[::-1], []
    for word in words:
        if joined and word.text and _CLOSING.issuperset(word.text):
            previous = joined[-1]
            if not previous.text.endswith(" "):
                joined[-1] = Word(previous.text + word.text, previous.start, previous.end)
                continue
        joined.append(word)
    return joined
