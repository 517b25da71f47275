"""Error kinds: messages that differ only in their values are grouped and counted."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_MAX_CHARS = 300
# Names of parameters and models are part of a kind; other quoted text and numbers are not.
_VALUE = re.compile(r"(`[^`]*`)|'[^']*'|\"[^\"]*\"|\d[\d,.]*\d|\d")

_Error = TypeVar("_Error")


def error_kind(message: str) -> str:
    """Return the part of a message that is the same for all values."""
    return _VALUE.sub(lambda match: match[1] or "…", message[:_MAX_CHARS])


@dataclass(slots=True)
class ErrorKind(Generic[_Error]):
    """Errors of one kind; `first` has the first ones, in the order of addition."""

    first_message: str
    first: list[_Error] = field(default_factory=list)
    count: int = 0
    is_one_message: bool = True

    @property
    def message(self) -> str:
        """Message of the first error, marked if others have other values."""
        words = self.first_message
        return words if self.is_one_message else f"{words.rstrip('.')}, and similar ones"


class ErrorCounter(Generic[_Error]):
    """Counts errors by kind; keeps up to `max_kinds`, and the first `max_first` errors of each."""

    def __init__(self, max_kinds: float = math.inf, max_first: float = math.inf) -> None:
        self.count = 0
        self._max_kinds = max_kinds
        self._max_first = max_first
        self._kinds: dict[Hashable, ErrorKind[_Error]] = {}

    def add(self, message: str, error: _Error, group: Hashable = None) -> ErrorKind[_Error] | None:
        """Count an error and return its kind; None above the limit of kinds.

        Errors of different groups are always of different kinds.
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
        """Return the most frequent kinds; kinds with equal counts are in order of appearance."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)[:limit]
