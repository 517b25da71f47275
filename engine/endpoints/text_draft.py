"""Drafts: values that lack only the encodings of some texts, which may be tokenized elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


class TextReader(Protocol):
    """A tokenizer of whole texts, for threads."""

    def read(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        """Return the encoding of each text."""


@dataclass(frozen=True, slots=True)
class TextDraft(Generic[_Value]):
    """A value that lacks only the encodings of some texts, which `complete` receives."""

    reader: TextReader
    texts: Sequence[str]
    add_special_tokens: bool
    complete: Callable[[list[Any]], _Value]

    def read(self) -> _Value:
        """Tokenize the texts and return the value."""
        return self.complete(
            self.reader.read(self.texts, add_special_tokens=self.add_special_tokens)
        )

    def then(self, function: Callable[[_Value], _Other]) -> TextDraft[_Other]:
        """Return a draft of a function's value."""
        complete = self.complete
        return TextDraft(
            self.reader,
            self.texts,
            self.add_special_tokens,
            lambda encodings: function(complete(encodings)),
        )
