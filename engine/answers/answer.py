"""What an assistant's text comes to: pieces of thinking, answer and calls; and who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    """What a stretch of text added to an answer; all of the pieces put together are the answer.

    `warning` says what was found wrong, such as a call that could not be read and stays content.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()
    warning: str | None = None


class Reader(Protocol):
    """Reads one choice's text as it comes, in stretches cut anywhere.

    However the text is cut, the pieces put together are the same.
    """

    def push(self, text: str) -> Sequence[Piece]:
        """Read the next stretch, and return what is certain now."""

    def end(self) -> Sequence[Piece]:
        """Return the rest, once the text has ended."""

    @property
    def thinking(self) -> Sequence[tuple[int, int]]:
        """Return from which to which character of the text so far the model was thinking."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is a JSON text, as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """All that one choice says. `thinking` has the stretches of its text that are reasoning."""

    reasoning: str
    content: str
    calls: tuple[Call, ...] = ()
    warnings: tuple[str, ...] = ()
    thinking: tuple[tuple[int, int], ...] = ()


class Reading(Protocol):
    """How the answers to one request are read.

    `markers` are the special tokens that a reader must see, though others are skipped in the text.
    """

    @property
    def markers(self) -> frozenset[int]:
        """Return their ids."""

    @property
    def thinks(self) -> bool:
        """Say whether some of an answer may be thinking, to be counted and shown apart."""

    def reader(self, choice: int) -> Reader:
        """Begin to read the choice of that number."""


def read(reader: Reader, text: str) -> Answer:
    """Return what a whole text says."""
    answer = put_together([*reader.push(text), *reader.end()])
    return replace(answer, thinking=tuple(reader.thinking))


def put_together(pieces: Iterable[Piece]) -> Answer:
    """Return the answer that these pieces, which are all of it, make up."""
    reasoning, content, warnings = [], [], []
    calls: dict[int, Call] = {}
    for piece in pieces:
        reasoning.append(piece.reasoning)
        content.append(piece.content)
        if piece.warning is not None:
            warnings.append(piece.warning)
        for more in piece.calls:
            begun = calls.get(more.index, Call(more.call_id or "", more.name or "", ""))
            arguments = begun.arguments + more.arguments
            calls[more.index] = Call(begun.call_id, begun.name, arguments)
    return Answer("".join(reasoning), "".join(content), tuple(calls.values()), tuple(warnings))
