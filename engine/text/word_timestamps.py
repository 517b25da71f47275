"""Word timestamps from token timestamps, split and merged as in openai-whisper.

A word begins at a token that begins with a space; a punctuation token is a separate word, which is
merged into its neighbor without its time. In languages without spaces each character is a word, or
all characters of one token.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

# Punctuation before a word, and after one.
_OPENING = frozenset("\"'“¿([{-")
_CLOSING = frozenset("\"'.。,，!！?？:：”)]}、")  # noqa: RUF001 - punctuation of other scripts

Times = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Word:
    """A spoken word from `start` to `end`, in seconds; `text` includes the space before it."""

    text: str
    start: float
    end: float


def word_timestamps(
    pieces: Sequence[bytes], times: Sequence[Times], *, has_spaces: bool
) -> tuple[Word, ...]:
    """Return the words of a text whose tokens have the bytes `pieces` and the `times`."""
    words = _characters(pieces, times)
    if has_spaces:
        words = _between_spaces(words)
    return tuple(word for word in _with_punctuation(words) if word.text.strip())


def _characters(pieces: Sequence[bytes], times: Sequence[Times]) -> list[Word]:
    """Return the texts of the shortest runs of tokens that form complete characters."""
    characters: list[Word] = []
    pending, start = b"", 0.0
    for i, (piece, (begins, ends)) in enumerate(zip(pieces, times, strict=True)):
        start = start if pending else begins
        pending += piece
        is_last = i == len(pieces) - 1
        try:
            text = pending.decode("utf-8", "replace" if is_last else "strict")
        except UnicodeDecodeError as exc:
            if exc.reason == "unexpected end of data":
                continue  # the rest of a character comes with the next token
            text = pending.decode("utf-8", "replace")
        characters.append(Word(text, start, ends))
        pending = b""
    return characters


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
    """Merge opening punctuation into the next word, other punctuation into the word before it."""
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
