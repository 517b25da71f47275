"""Error kinds: messages that differ in values only are grouped and counted."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_MAX_CHARS = 300
# Names of parameters and models make a kind; other quoted text and numbers do not.
_VALUE = re.compile(r"(`[^`]*`)|'[^']*'|\"[^\"]*\"|\d[\d,.]*\d|\d")

_Error = TypeVar("_Error")


def error_kind(message: str) -> str:
    """Return what a message has in common with those that differ from it in values only."""
    return _VALUE.sub(lambda match: match[1] or "…", message[:_MAX_CHARS])


@dataclass(slots=True)
class ErrorKind(Generic[_Error]):
    """Errors of one kind; `first` are the first of them, in the order in which they were added."""

    first_message: str
    first: list[_Error] = field(default_factory=list)
    count: int = 0
    is_one_message: bool = True

    @property
    def message(self) -> str:
        """Message of the first error, marked if others differ from it in values."""
        words = self.first_message
        return words if self.is_one_message else f"{words.rstrip('.')}, and the like"


class ErrorCounter(Generic[_Error]):
    """Counts errors by kind; keeps up to `max_kinds`, and the first `max_first` errors of each."""

    def __init__(self, max_kinds: float = math.inf, max_first: float = math.inf) -> None:
        self.count = 0
        self._max_kinds = max_kinds
        self._max_first = max_first
        self._kinds: dict[Hashable, ErrorKind[_Error]] = {}

    def add(self, message: str, error: _Error, group: Hashable = None) -> ErrorKind[_Error] | None:
        """Count an error and return its kind, None for one too many.

        Errors of different groups are never of one kind.
        """
        self.count += 1
        key = group, error_kind(message)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= self._max_kinds:
                return None
            kind = self._kinds[key] = ErrorKind(message)
        kind.count += 1
        kind.is_one_message &= message == kind.first_message
        if len(kind.first) < self._max_first:
            kind.first.append(error)
        return kind

    def most_frequent(self, limit: int) -> list[ErrorKind[_Error]]:
        """Return the most frequent kinds; of equals the one that came first."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)[:limit]
