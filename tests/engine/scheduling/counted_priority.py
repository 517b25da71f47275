"""Priorities whose comparisons are counted, since times vary with the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Self


class CountedPriority(int):
    """A priority that counts how often two are compared by size."""

    _count: ClassVar[int] = 0

    @classmethod
    @contextmanager
    def counting(cls) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the number of comparisons in this block."""
        before = cls._count
        yield lambda: cls._count - before

    def __lt__(self, other: Self | int) -> bool:
        """Compare two priorities."""
        CountedPriority._count += 1
        return int(self) < int(other)

    def __gt__(self, other: Self | int) -> bool:
        """Compare two priorities."""
        CountedPriority._count += 1
        return int(self) > int(other)
