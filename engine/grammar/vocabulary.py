"""A model's tokens as llguidance knows them: by their bytes, and which of them end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from engine.text.tokenizer import Tokenizer

# Of a text that must come, so much is tokenized at a time, and the last tokens, which may come out
# otherwise with what follows, are left to the next time.
_MOST_CHARS = 256
_LAST_TOKENS = 8
_LINE = "\n"


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """A model's tokens: their bytes, those that may end a text, and all of it as llguidance's."""

    pieces: Sequence[bytes]
    ends: list[int]
    known: LLTokenizer


def known_tokens(tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> KnownTokens:
    """Return the vocabulary of a model; any of `end_ids` may end a text."""
    wrapped = _Wrapped(tokenizer, vocab_size)
    ends = sorted(i for i in end_ids if 0 <= i < vocab_size) or [wrapped.eos_token_id]
    known = LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=ends)
    wrapped.known = known
    return KnownTokens(wrapped.tokens, ends, known)


class _Wrapped(TokenizerWrapper):
    """A tokenizer with what llguidance asks of one, by the names that it asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.known: LLTokenizer | None = None
        self.tokens = [tokenizer.piece(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_special(i)]
        # Stands for the end where a model has none, so it should be no part of any text.
        unwritten = [token_id for token_id, piece in enumerate(self.tokens) if not piece]
        self.eos_token_id = [*self.special_token_ids, *unwritten, vocab_size - 1][0]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return how a text begins that must come: as the model would write it, where that is it.

        Special tokens would make it another text, and so would the space that some vocabularies
        write before the first word, if it is not one that follows a line.
        """
        beginning = text[:_MOST_CHARS]
        line = self._encoded(_LINE)
        behind_line = self._encoded(_LINE + beginning)
        ways = [self._encoded(beginning)]
        if behind_line[: len(line)] == line:
            ways.append(behind_line[len(line) :])
        for ids in ways:
            certain = ids if len(text) == len(beginning) else ids[:-_LAST_TOKENS]
            pieces = b"".join(self.tokens[token_id] for token_id in certain)
            is_same = pieces and beginning.encode().startswith(pieces)
            if is_same and not any(map(self._tokenizer.is_special, certain)):
                return certain
        assert self.known is not None
        return self.known.greedy_tokenize(beginning)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
