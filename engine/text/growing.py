"""A text as its tokens come: what no later token can take back, at once."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer

_Utf8 = getincrementaldecoder("utf-8")


class Beginnings:
    """How much of each of some texts the end of another may be the beginning of; shared by any.

    Each is walked through as Knuth, Morris and Pratt do, so that a byte costs the same whatever
    the texts are.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = [(text, _borders(text)) for text in texts]

    @property
    def at_start(self) -> list[int]:
        """Return the lengths before the first byte."""
        return [0] * len(self._texts)

    def after(self, lengths: list[int], data: bytes) -> list[int]:
        """Return how many bytes of each text the end is, once `data` follows `lengths`."""
        return [
            _walked(text, borders, length, data)
            for (text, borders), length in zip(self._texts, lengths, strict=True)
        ]


class GrowingText:
    """The text of one sequence, told piece by piece.

    A character is told once it is whole, and what may be the beginning of a stop string once it is
    none. Put together the pieces are the whole text, to which `end` is given.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        beginnings: Beginnings | None = None,
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
        self._num_told = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens, and return what is certain now."""
        new = self._tokenizer.text_bytes(
            token_ids, skip_special_tokens=self._skip_special_tokens, markers=self._markers
        )
        data = self._held + new
        if self._beginnings:
            self._lengths = self._beginnings.after(self._lengths, new)
            num_certain = len(data) - max(self._lengths)
            data, self._held = data[:num_certain], data[num_certain:]
        text = self._decoder.decode(data)
        self._num_told += len(text)
        return text

    def end(self, text: str) -> str:
        """Return what of the whole `text` is not told yet."""
        return text[self._num_told :]


def _borders(text: bytes) -> list[int]:
    """Return for each beginning of a text how many bytes of it are its own end again."""
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
        if length == len(text):  # a whole one that ended nothing, before the least tokens
            length = borders[length - 1]
    return length
