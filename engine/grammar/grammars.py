"""The grammars of one model: what was asked of an output, as a constraint on its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
from llguidance import LLMatcher

from engine.grammar.beginning import Beginning, beginning
from engine.grammar.compiling import compiled
from engine.grammar.constraint import TextConstraint, first_words
from engine.grammar.forms import grammar_of
from engine.grammar.trial import MAX_SECONDS, compiles_in_time
from engine.grammar.vocabulary import KnownTokens, known_tokens
from engine.protocol.constraints import Asked
from engine.protocol.errors import RequestError
from engine.text.tokenizer import Tokenizer

_MOST_KEPT = 256
_MOST_KEPT_CHARS = 2**22


class Grammars:
    """Makes constraints of one model's tokens; safe to use from threads.

    What was made lately of a grammar is kept, within bounds, so that thousands of them in a file
    take no more memory than a few.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._lock, self._making = Lock(), Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_kept_chars = 0
        self._beginnings: dict[str, Beginning] = {}
        self._made: KnownTokens | None = None

    def constraint(
        self, asked: Asked, *, begins_after: str | None = None, opened_by: str | None = None
    ) -> TextConstraint:
        """Return what holds an output to what was asked for, from `begins_after` in it on.

        With `opened_by`, one that does not begin with that token is held to it at once.
        Raises `RequestError` for what cannot be held to.
        """
        try:
            grammar = grammar_of(asked)
        except ValueError as exc:
            raise _refusal(asked.param, str(exc)) from exc
        if grammar not in self._kept and not compiles_in_time(grammar):
            raise _refusal(asked.param, f"it takes more than {MAX_SECONDS} seconds to compile")
        self.matcher(grammar, asked.param)
        openers: Sequence[int | None] = [None]
        if opened_by is not None:
            openers = self._tokenizer.encode(opened_by, add_special_tokens=False)
        if begins_after is None or len(openers) != 1:
            return TextConstraint(grammar, None, self, asked.param)
        before = self._beginning(begins_after)
        return TextConstraint(grammar, before, self, asked.param, openers[0])

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return what goes through a grammar from its beginning."""
        with self._lock:
            first = self._kept.get(grammar)
            if first is not None:
                self._kept.move_to_end(grammar)
        if first is None:
            first = self.fresh_matcher(grammar, param)
            self._keep(grammar, first)
        return first.deep_copy()

    def fresh_matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return one that shares nothing with any other; `RequestError` where there is none."""
        matcher = compiled(self._tokens().known, grammar)
        if not matcher.is_error():
            mask = np.empty(-(-self._vocab_size // 32), np.uint32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise _refusal(param, first_words(matcher.get_error()))
        return matcher

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.piece(token_id)

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = matcher
                self._num_kept_chars += len(grammar)
            while len(self._kept) > _MOST_KEPT or self._num_kept_chars > _MOST_KEPT_CHARS:
                oldest, _ = self._kept.popitem(last=False)
                self._num_kept_chars -= len(oldest)

    def _beginning(self, text: str) -> Beginning:
        tokens = self._tokens()
        with self._making:
            if text not in self._beginnings:
                self._beginnings[text] = beginning(text, tokens, self._vocab_size)
            return self._beginnings[text]

    def _tokens(self) -> KnownTokens:
        """Return the vocabulary, made when first asked for: most files ask for no constraint."""
        with self._making:
            if self._made is None:
                self._made = known_tokens(self._tokenizer, self._vocab_size, self._end_ids)
            return self._made


def _refusal(param: str, words: str) -> RequestError:
    return RequestError(
        f"`{param}` cannot be held to: {words}", param=param, code="invalid_constraint"
    )
