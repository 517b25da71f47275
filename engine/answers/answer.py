"""What an assistant's text comes to: pieces of thinking, answer and calls; and who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of call `index`: `name` and `call_id` come whole with its first piece, then are None.

    `arguments` is the next part of a JSON text.
    """

    index: int
    arguments: str = ""
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stretch of text added to an answer; all of the pieces put together are the answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class Reader(Protocol):
    """Reads one choice's text as it comes, in stretches cut anywhere.

    However the text is cut, the pieces put together are the same.
    """

    def push(self, text: str) -> Sequence[Piece]:
        """Read the next stretch, and return what is certain now."""

    def end(self) -> Sequence[Piece]:
        """Return the rest, once the text has ended."""
