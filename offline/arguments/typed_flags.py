"""Typed flags of a run, which its run card records for a retry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_FILES: Final = ("--input-file", "--output-file", "-i", "-o")
_MODES: Final = frozenset(
    ("--resume", "--retry-failed", "--retry-truncated", "--force", "--allow-other-settings")
)

_NUMBER: Final = re.compile(r"-[\d.]")


def repeated_flags(typed: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    """Return the words typed after `run` without input, output, and flags such as `--resume`.

    `files` are the positional inputs among them.
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
    """Return the flags without the one of this name and its values."""
    remaining, is_dropped = [], False
    for word in flags:
        if _is_flag(word):
            is_dropped = word == name or word.startswith(f"{name}=")
        if not is_dropped:
            remaining.append(word)
    return remaining


def without_replaced(flags: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return flags without those that have another value in `others`."""
    remaining = [*flags]
    for word in others:
        if _is_flag(word):
            remaining = without_flag(remaining, word.partition("=")[0])
    return remaining


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)


def _without_files(words: list[str], files: Sequence[str]) -> list[str]:
    """Return the words without the files: each is the first word, or the last equal word."""
    for file in files:
        place = 0 if words[:1] == [file] else len(words) - 1 - words[::-1].index(file)
        del words[place]
    return words


def _has_file(word: str) -> bool:
    """Return whether a word is a file flag joined to its value."""
    return any(
        word.startswith(f"{flag}=" if flag.startswith("--") else flag)
        for flag in _FILES
        if flag.startswith("--") or not word.startswith("--")
    )
