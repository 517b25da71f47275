"""The grammars of one model: what was asked of an output, as a constraint on its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock

import numpy as np
from llguidance import LLMatcher

from engine.grammar.beginning import Beginning, beginning
from engine.grammar.compiling import MAX_SECONDS, compiled
from engine.grammar.constraint import TextConstraint, first_words
from engine.grammar.forms import grammar_of
from engine.grammar.vocabulary import KnownTokens, known_tokens
from engine.protocol.constraints import Asked
from engine.protocol.errors import RequestError
from engine.text.tokenizer import Tokenizer

# About what a compiled grammar takes: 85 kB for a small schema, 800 kB for 200 properties.
_BYTES_EACH = 80_000
_BYTES_A_CHAR = 60
_MOST_KEPT_BYTES = 2**28


class Grammars:
    """Makes constraints of one model's tokens; safe to use from threads.

    What was made lately of a grammar, or why nothing was, is kept, within bounds: none is compiled
    twice while it is in use, and thousands of them in a file take no more memory than these bounds.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._lock, self._making = Lock(), Lock()
        self._kept: OrderedDict[str, Future[LLMatcher | str]] = OrderedDict()
        self._num_kept_bytes = 0
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
            kept = self._kept.get(grammar)
            if is_first := kept is None:
                kept = self._keep(grammar)
            else:
                self._kept.move_to_end(grammar)
        if is_first:
            self._make(grammar, kept)
        made = kept.result()  # of another thread, where that was the first to ask
        if isinstance(made, str):
            raise _refusal(param, made)
        return made.deep_copy()

    def fresh_matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return one that shares nothing with any other; `RequestError` where there is none."""
        made = self._compiled(grammar)
        if isinstance(made, str):
            raise _refusal(param, made)
        return made

    def _compiled(self, grammar: str) -> LLMatcher | str:
        """Return what goes through a grammar, or what is wrong with that."""
        try:
            matcher = compiled(self._tokens().known, grammar)
        except TimeoutError:
            return f"it takes more than {MAX_SECONDS:g} seconds to compile"
        if not matcher.is_error():
            mask = np.empty(-(-self._vocab_size // 32), np.uint32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return first_words(matcher.get_error()) if matcher.is_error() else matcher

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.piece(token_id)

    def _keep(self, grammar: str) -> Future[LLMatcher | str]:
        """Make a place for a grammar, and let go of what was asked for longest ago."""
        kept = self._kept[grammar] = Future()
        self._num_kept_bytes += _num_bytes(grammar)
        while self._num_kept_bytes > _MOST_KEPT_BYTES and len(self._kept) > 1:
            oldest, _ = self._kept.popitem(last=False)
            self._num_kept_bytes -= _num_bytes(oldest)
        return kept

    def _make(self, grammar: str, kept: Future[LLMatcher | str]) -> None:
        try:
            kept.set_result(self._compiled(grammar))
        except BaseException as exc:
            kept.set_exception(exc)
            with self._lock:
                if self._kept.get(grammar) is kept:
                    del self._kept[grammar]
                    self._num_kept_bytes -= _num_bytes(grammar)
            raise

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


def _num_bytes(grammar: str) -> int:
    return _BYTES_EACH + _BYTES_A_CHAR * len(grammar)


def _refusal(param: str, words: str) -> RequestError:
    return RequestError(
        f"`{param}` cannot be held to: {words}", param=param, code="invalid_constraint"
    )
