"""Patterns of module names in an adapter's config, matched within a time budget.

PEFT matches them with Python's `re`, for which some patterns take exponential time. They need
features that no linear-time matcher has, such as lookahead. So the time for all matches of one
adapter is limited instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import regex

MAX_PATTERN_CHARS = 500
# CPU seconds for all matches of one adapter; a large one takes a few hundredths.
BUDGET_SECONDS = 5.0
# Names that a pattern matches in PEFT: a whole name, the end of a name, and modules in a layer,
# whose number follows.
WHOLE, END, IN_LAYER = "{}", r"(.*\.)?({})$", r".*\.{}\.(\d+)\..*"


class PatternRefused(Exception):
    """Error for a pattern that is invalid or takes too long to match."""


@dataclass
class Patterns:
    """Compiled patterns, and the CPU seconds left for their matches."""

    seconds_left: float = field(default_factory=lambda: BUDGET_SECONDS)
    _compiled: dict[tuple[str, str], Any] = field(default_factory=dict)

    def match(self, key: str, pattern: str, name: str, within: str = WHOLE) -> Any | None:
        """Return the match of a name by a field's pattern, or None.

        Raises `PatternRefused`, which names the field `key`.
        """
        return next(self._matches(key, [pattern], name, within), (None, None))[1]

    def first_of(self, key: str, patterns: Iterable[str], name: str) -> str | None:
        """Return the first pattern that is the end of a name, or None."""
        return next(self._matches(key, patterns, name, END), (None, None))[0]

    def _matches(
        self, key: str, patterns: Iterable[str], name: str, within: str
    ) -> Iterator[tuple[str, Any]]:
        """Yield the patterns that match a name, with their matches."""
        left = self.seconds_left
        ends = time.thread_time() + left
        try:
            for pattern in patterns:
                compiled = self._compiled.get((pattern, within))
                if left <= 0 or (compiled is None and time.thread_time() > ends):
                    raise _too_long(key, pattern)
                if compiled is None:
                    compiled = _compile(key, pattern, within.replace("{}", pattern))
                    self._compiled[pattern, within] = compiled
                try:
                    match = compiled.fullmatch(name, timeout=left)
                except TimeoutError:
                    raise _too_long(key, pattern) from None
                if match is not None:
                    yield pattern, match
        finally:
            self.seconds_left = ends - time.thread_time()


def _too_long(key: str, pattern: str) -> PatternRefused:
    return PatternRefused(f"{key} {pattern[:100]!r}, which takes too long to match")


def _compile(key: str, pattern: str, whole: str) -> Any:
    try:
        if len(pattern) <= MAX_PATTERN_CHARS:
            return regex.compile(whole, cache_pattern=False)
    except (regex.error, RecursionError, OverflowError, ValueError):
        pass
    raise PatternRefused(f"{key} {pattern[:100]!r}, which is not a valid pattern")
