"""A model's vocabulary for llguidance: the bytes of its tokens, and its end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ..text.tokenizer import Tokenizer

# A forced text is tokenized in pieces of this size; its last tokens, which the following text may
# change, are left for the next piece.
_MOST_CHARS = 256
_LAST_TOKENS = 8
_LINE = "\n"
_CACHED_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The bytes of all tokens, the ids of end tokens, and llguidance's tokenizer of them."""

    pieces: Sequence[bytes]
    end_ids: list[int]
    llguidance_tokenizer: LLTokenizer


def grammar_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]
) -> GrammarVocabulary:
    """Return the vocabulary of a model; any of `end_ids` may end a text."""
    wrapped = _Wrapped(tokenizer, vocab_size)
    ends = sorted(i for i in end_ids if 0 <= i < vocab_size) or [wrapped.eos_token_id]
    llguidance_tokenizer = LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=ends)
    wrapped.llguidance_tokenizer = llguidance_tokenizer
    return GrammarVocabulary(wrapped.tokens, ends, llguidance_tokenizer)


class _Wrapped(TokenizerWrapper):
    """Adapter of a tokenizer to llguidance's interface."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.llguidance_tokenizer: LLTokenizer | None = None
        self.tokens = [tokenizer.piece(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_special(i)]
        # The end token of a model without one, so it should not be part of any text.
        unwritten = [token_id for token_id, piece in enumerate(self.tokens) if not piece]
        self.eos_token_id = [*self.special_token_ids, *unwritten, vocab_size - 1][0]
        self._tokenizer = tokenizer
        # The same names and braces are forced row after row.
        self._tokenized = lru_cache(_CACHED_TEXTS)(self._tokenize)

    def __call__(self, text: str) -> list[int]:
        """Return tokens of the beginning of a forced text, as the model would write it if possible.

        Special tokens would change the text, and so would the space that some vocabularies put
        before the first word, except after a newline.
        """
        return self._tokenized(text[:_MOST_CHARS], len(text) <= _MOST_CHARS)

    def _tokenize(self, beginning: str, is_all: bool) -> list[int]:  # noqa: FBT001 - of a cache
        line = self._encoded(_LINE)
        after_line = self._encoded(_LINE + beginning)
        ways = [self._encoded(beginning)]
        if after_line[: len(line)] == line:
            ways.append(after_line[len(line) :])
        for ids in ways:
            certain = ids if is_all else ids[:-_LAST_TOKENS]
            pieces = b"".join(self.tokens[token_id] for token_id in certain)
            is_same = pieces and beginning.encode().startswith(pieces)
            if is_same and not any(map(self._tokenizer.is_special, certain)):
                return certain
        assert self.llguidance_tokenizer is not None
        return self.llguidance_tokenizer.greedy_tokenize(beginning)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


_BITS = 32


def allow(mask: NDArray[np.uint32], token_ids: NDArray[np.int64]) -> None:
    """Set the bits of these tokens."""
    np.bitwise_or.at(mask, token_ids // _BITS, _bits(token_ids))


def bar(mask: NDArray[np.uint32], token_ids: NDArray[np.int64]) -> None:
    """Clear the bits of these tokens."""
    np.bitwise_and.at(mask, token_ids // _BITS, ~_bits(token_ids))


def _bits(token_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.uint32(1) << (token_ids % _BITS).astype(np.uint32)
