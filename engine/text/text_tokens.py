"""Positions of a text's tokens in the text, in characters, and where words begin."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class TextTokens(NamedTuple):
    """The tokens of a `text` without special ones.

    `places [t]` are their indexes in the sequence. Token i is `text[starts[i]:ends[i]]`, and
    continues the word of the token before if `is_subword[i]`.
    """

    text: str
    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_subword: NDArray[np.bool_]


class TokenLocator:
    """Locates the tokens of a tokenizer's encodings, which have offsets.

    WordPiece marks the tokens inside a word; other tokenizers' words are between spaces, as in
    transformers. `unknown_id` is the token of unknown words.
    """

    def __init__(self, backend: Any, unknown_id: int | None) -> None:
        self._marks_subwords = bool(getattr(backend.model, "continuing_subword_prefix", None))
        self._unknown_id = unknown_id

    def locate(self, encoding: Any, text: str, first: int) -> TextTokens:
        """Return the tokens of a text, whose character `first` is the first one that was read."""
        places = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)[places] + first  # [t, 2]
        starts, ends = offsets[:, 0], offsets[:, 1]
        if self._marks_subwords:
            names = encoding.tokens
            lengths = np.fromiter((len(names[place]) for place in places), np.int64, len(places))
            is_subword = lengths != ends - starts
        else:
            is_subword = np.fromiter(
                (start > 0 and " " not in text[start - 1 : start + 1] for start in starts.tolist()),
                np.bool_,
                len(starts),
            )
        if self._unknown_id is not None:
            is_subword &= np.array(encoding.ids)[places] != self._unknown_id
        return TextTokens(text, places, starts, ends, is_subword)
