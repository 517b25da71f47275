"""Typed flags of a run: what its run card repeats, so that a retry knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_FILES: Final = ("--input-file", "--output-file", "-i", "-o")
_MODES: Final = frozenset(
    ("--resume", "--retry-failed", "--retry-truncated", "--force", "--allow-other-settings")
)


def repeated_flags(typed: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    """Return the words typed after `run` without input, output, and the flags of one attempt.

    `files` are the inputs among them that no flag names.
    """
    words, flags = _without_files([*typed[1:]], files), []
    while words:
        word = words.pop(0)
        if word in _FILES:
            del words[:1]
        elif not (word in _MODES or _has_file(word)):
            flags.append(word)
    return tuple(flags)


def without_flag(flags: Sequence[str], name: str) -> list[str]:
    """Return flags without one that has a value."""
    places = [place for place, word in enumerate(flags) if word == name]
    dropped = {at for place in places for at in (place, place + 1)}
    return [
        word
        for place, word in enumerate(flags)
        if place not in dropped and not word.startswith(f"{name}=")
    ]


def _without_files(words: list[str], files: Sequence[str]) -> list[str]:
    """Return words without the files: each is the first word, or the last one that equals it."""
    for file in files:
        place = 0 if words[:1] == [file] else len(words) - 1 - words[::-1].index(file)
        del words[place]
    return words


def _has_file(word: str) -> bool:
    """Say whether a word is a flag of a file joined to its value."""
    return any(
        word.startswith(f"{flag}=" if flag.startswith("--") else flag)
        for flag in _FILES
        if flag.startswith("--") or not word.startswith("--")
    )
