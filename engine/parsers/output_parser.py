"""Output parser of one request: reasoning parser first, then tool call parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from .registry import ParserSet
from .text_stream import ParserCoroutine, StreamParser, TextStream
from .tool_calls import MISTRAL


@dataclass(frozen=True, slots=True)
class ModelOutputParser:
    """Parses answers with a model's parsers; an `OutputParser`.

    `is_open` means that the prompt has opened the reasoning. `tools` maps tool names to argument
    schemas. `is_single` allows only the first call. An answer that `is_constrained` has calls only
    where its grammar allows them. `key` seeds the call ids: a row gets the same ids in every run.
    """

    parsers: ParserSet
    key: str
    is_open: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_single: bool = False
    is_constrained: bool = False
    markers: frozenset[int] = frozenset()

    @property
    def has_reasoning(self) -> bool:
        """Return whether an answer may begin with reasoning."""
        return self.parsers.has_reasoning

    def for_choice(self, choice: int) -> StreamParser:
        """Return a parser for the choice with this number."""
        stream = TextStream(
            lambda index: self._id(choice, index),
            tools=self.tools,
            is_single=self.is_single,
            is_constrained=self.is_constrained,
        )
        return StreamParser(stream, self._read(stream))

    def _read(self, stream: TextStream) -> ParserCoroutine:
        if self.parsers.reasoning is not None:
            yield from self.parsers.reasoning.read(stream, is_open=self.is_open)
        if self.parsers.tool_calls is None:
            yield from stream.forward_until((), stream.emit_content)
        else:
            yield from self.parsers.tool_calls.read(stream)

    def _id(self, choice: int, index: int) -> str:
        digest = blake2b(f"{self.key} {choice} {index}".encode(), digest_size=12).hexdigest()
        # Mistral's templates reject other ids.
        return digest[:9] if self.parsers.tool_calls is MISTRAL else f"call_{digest}"
