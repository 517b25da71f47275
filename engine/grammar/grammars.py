"""The grammars of one model: what was asked of an output, as a constraint on its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
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

# About what a grammar takes, told by how long it took to compile: 90 kB for a small schema (1 ms),
# 10 MB for 20,000 states (0.1 s), 50 MB for a thousand bounded lists (0.8 s).
_BYTES_EACH = 50_000
_BYTES_A_SECOND = 10**8
_MOST_KEPT_BYTES = 2**28


@dataclass(slots=True, eq=False)
class _Kept:
    """What was made of a grammar, or why nothing was, and about what it takes."""

    made: Future[LLMatcher | str] = field(default_factory=Future)
    num_bytes: int = 0


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
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
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
                kept = self._kept[grammar] = _Kept()
                self._weigh(kept, _BYTES_EACH + len(grammar))
            else:
                self._kept.move_to_end(grammar)
        if is_first:
            self._make(grammar, kept)
        made = kept.made.result()  # of another thread, where that was the first to ask
        if isinstance(made, str):
            raise _refusal(param, made)
        return made.deep_copy()

    def fresh_matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return one that shares nothing with any other; `RequestError` where there is none."""
        made, _ = self._compiled(grammar)
        if isinstance(made, str):
            raise _refusal(param, made)
        return made

    def _compiled(self, grammar: str) -> tuple[LLMatcher | str, float]:
        """Return what goes through a grammar and how long it took, or what is wrong with that."""
        try:
            matcher, seconds = compiled(self._tokens().known, grammar)
        except TimeoutError:
            return f"it takes more than {MAX_SECONDS:g} seconds to compile", 0.0
        if not matcher.is_error():
            mask = np.empty(-(-self._vocab_size // 32), np.uint32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return first_words(matcher.get_error()), 0.0
        return matcher, seconds

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.piece(token_id)

    def _weigh(self, kept: _Kept, num_bytes: int) -> None:
        """Count what one takes, and let go of those that were asked for longest ago."""
        kept.num_bytes += num_bytes
        self._num_kept_bytes += num_bytes
        while self._num_kept_bytes > _MOST_KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.num_bytes

    def _make(self, grammar: str, kept: _Kept) -> None:
        try:
            made, seconds = self._compiled(grammar)
        except BaseException as exc:
            kept.made.set_exception(exc)
            with self._lock:
                if self._kept.get(grammar) is kept:
                    del self._kept[grammar]
                    self._num_kept_bytes -= kept.num_bytes
            raise
        kept.made.set_result(made)
        with self._lock:
            if self._kept.get(grammar) is kept:
                self._weigh(kept, int(seconds * _BYTES_A_SECOND))

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
