"""Incremental detokenization: the text of a sequence as its tokens arrive."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from .tokenizer import Tokenizer

_Utf8 = getincrementaldecoder("utf-8")


class StopPrefixes:
    """Partial matches of stop strings at the end of a text; may be shared by sequences.

    Each has an automaton by Knuth, Morris and Pratt, so that the cost of a byte does not depend on
    the strings.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = [(text, _borders(text)) for text in texts]

    @property
    def at_start(self) -> list[int]:
        """Return the match lengths before the first byte."""
        return [0] * len(self._texts)

    def after(self, lengths: list[int], data: bytes) -> list[int]:
        """Return the match lengths after `data` follows a text with match lengths `lengths`."""
        return [
            _walked(text, borders, length, data)
            for (text, borders), length in zip(self._texts, lengths, strict=True)
        ]


class IncrementalDetokenizer:
    """Detokenizes one sequence piece by piece.

    A character is returned once it is complete, and a partial match of a stop string once it is
    refuted. The pieces together are the whole text, which is passed to `end`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        beginnings: StopPrefixes | None = None,
        *,
        skip_special_tokens: bool = True,
        markers: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._markers = markers
        self._beginnings = beginnings
        self._lengths = beginnings.at_start if beginnings else []
        self._held = b""
        self._decoder = _Utf8("replace")
        self._num_returned = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens, and return the text that is final now."""
        new = self._tokenizer.text_bytes(
            token_ids, skip_special_tokens=self._skip_special_tokens, markers=self._markers
        )
        data = self._held + new
        if self._beginnings:
            self._lengths = self._beginnings.after(self._lengths, new)
            num_certain = len(data) - max(self._lengths)
            data, self._held = data[:num_certain], data[num_certain:]
        text = self._decoder.decode(data)
        self._num_returned += len(text)
        return text

    def end(self, text: str) -> str:
        """Return the rest of the complete `text`."""
        return text[self._num_returned :]


def _borders(text: bytes) -> list[int]:
    """Return KMP's failure function: the longest border of each prefix of a text."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        length += text[place] == text[length]
        borders[place] = length
    return borders


def _walked(text: bytes, borders: list[int], length: int, data: bytes) -> int:
    for byte in data:
        while length and text[length] != byte:
            length = borders[length - 1]
        length += text[length] == byte
        if length == len(text):  # a complete match that did not stop, before `min_tokens`
            length = borders[length - 1]
    return length
