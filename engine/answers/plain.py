"""Texts that hold nothing but an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.answers.answer import Piece


@dataclass(frozen=True, slots=True)
class PlainReading:
    """Reads every text as content; a `Reading` and a `Reader`."""

    @property
    def markers(self) -> frozenset[int]:
        """Return none."""
        return frozenset()

    @property
    def thinks(self) -> bool:
        """Say that all is answer."""
        return False

    def reader(self, choice: int) -> PlainReading:
        """Return itself: nothing has to be remembered."""
        del choice
        return self

    def push(self, text: str) -> Sequence[Piece]:
        """Return the stretch as it is."""
        return [Piece(content=text)] if text else []

    def end(self) -> Sequence[Piece]:
        """Return nothing: all was certain at once."""
        return []

    @property
    def thinking(self) -> Sequence[tuple[int, int]]:
        """Return none."""
        return ()
