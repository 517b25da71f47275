"""Parsed output: deltas of reasoning, content and tool calls; contracts of their parsers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DeltaToolCall:
    """The next part of call `index`; only its first delta has `name` and `call_id`.

    `arguments` is the next part of a JSON text.
    """

    index: int
    arguments: str = ""
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class DeltaMessage:
    """A parsed piece of an answer; all deltas together are the answer.

    `warning` describes a fault, such as a call that could not be parsed and stays content.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[DeltaToolCall, ...] = ()
    warning: str | None = None


class ChoiceParser(Protocol):
    """Parses one choice's text as it streams, in pieces cut anywhere.

    The deltas' total does not depend on the cuts.
    """

    def push(self, text: str) -> Sequence[DeltaMessage]:
        """Parse the next piece of text, and return the deltas that are certain."""

    def end(self) -> Sequence[DeltaMessage]:
        """Return the last deltas, at the end of the text."""

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Return the character ranges of reasoning in the text so far."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A tool call; `arguments` is a JSON text, as the model wrote it."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """The message of one choice; `reasoning_spans` are character ranges of its text."""

    reasoning: str
    content: str
    calls: tuple[ParsedToolCall, ...] = ()
    warnings: tuple[str, ...] = ()
    reasoning_spans: tuple[tuple[int, int], ...] = ()


class OutputParser(Protocol):
    """Parser of the answers to one request.

    `markers` are special tokens that it needs in the text, even if others are skipped.
    """

    @property
    def markers(self) -> frozenset[int]:
        """Return the ids of the markers."""

    @property
    def has_reasoning(self) -> bool:
        """Return whether an answer may have reasoning, to be counted and shown separately."""

    def for_choice(self, choice: int) -> ChoiceParser:
        """Return a parser for the choice with this number."""


def parse_text(reader: ChoiceParser, text: str) -> ParsedMessage:
    """Return the message of a complete text."""
    answer = merge_deltas([*reader.push(text), *reader.end()])
    return replace(answer, reasoning_spans=tuple(reader.reasoning_spans))


def merge_deltas(pieces: Iterable[DeltaMessage]) -> ParsedMessage:
    """Return the message that consists of these deltas."""
    reasoning, content, warnings = [], [], []
    calls: dict[int, ParsedToolCall] = {}
    for piece in pieces:
        reasoning.append(piece.reasoning)
        content.append(piece.content)
        if piece.warning is not None:
            warnings.append(piece.warning)
        for more in piece.calls:
            begun = calls.get(more.index, ParsedToolCall(more.call_id or "", more.name or "", ""))
            arguments = begun.arguments + more.arguments
            calls[more.index] = ParsedToolCall(begun.call_id, begun.name, arguments)
    return ParsedMessage(
        "".join(reasoning), "".join(content), tuple(calls.values()), tuple(warnings)
    )


@dataclass(frozen=True, slots=True)
class PlainTextParser:
    """Parses every text as content; an `OutputParser` and a `ChoiceParser`."""

    @property
    def markers(self) -> frozenset[int]:
        """Return an empty set."""
        return frozenset()

    @property
    def has_reasoning(self) -> bool:
        """Return False: all text is content."""
        return False

    def for_choice(self, choice: int) -> PlainTextParser:
        """Return the parser itself, which has no state."""
        del choice
        return self

    def push(self, text: str) -> Sequence[DeltaMessage]:
        """Return the text unchanged."""
        return [DeltaMessage(content=text)] if text else []

    def end(self) -> Sequence[DeltaMessage]:
        """Return nothing: all text was emitted at once."""
        return []

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Return an empty tuple."""
        return ()
