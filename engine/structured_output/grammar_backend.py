"""Grammar backend of one model: structured output requests to constraints, with a compile cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from llguidance import LLMatcher

from tidemill.protocol.constraints.request import OutputConstraint
from tidemill.protocol.errors import RequestError

from ..text.tokenizer import Tokenizer
from .constraint import GrammarConstraint, UnconstrainedPrefix, unconstrained_prefix
from .grammar import compile_grammar, grammar_of, pattern_fault, refusal
from .vocabulary import GrammarVocabulary, grammar_vocabulary

# Estimated memory of a grammar, by its compile time: 90 kB for a small schema (1 ms),
# 10 MB for 20,000 states (0.1 s), 50 MB for a thousand bounded lists (0.8 s).
_BYTES_EACH = 50_000
_BYTES_A_SECOND = 10**8
_MAX_CACHE_BYTES = 2**28


@dataclass(slots=True, eq=False)
class _CacheEntry:
    """A compiled grammar, or its error, and its approximate size in bytes."""

    result: Future[LLMatcher | str] = field(default_factory=Future)
    num_bytes: int = 0


class GrammarBackend:
    """Compiles constraints with one model's tokens; thread-safe.

    Compiled grammars and errors are cached, within limits: no grammar is compiled twice while it is
    in use, and thousands of them in a file take no more memory than these limits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._lock, self._vocabulary_lock = Lock(), Lock()
        self._cache: OrderedDict[str, _CacheEntry] = OrderedDict()
        self._num_cache_bytes = 0
        self._prefixes: dict[str, UnconstrainedPrefix] = {}
        self._vocabulary: GrammarVocabulary | None = None

    def constraint(
        self,
        requested: OutputConstraint,
        *,
        begins_after: str | None = None,
        opened_by: str | None = None,
    ) -> GrammarConstraint:
        """Return the constraint of a request, which applies after the text `begins_after`.

        With `opened_by`, an output that does not begin with that token is constrained at once.
        Raises `RequestError` for an invalid constraint.
        """
        try:
            grammar = grammar_of(requested)
        except ValueError as exc:
            raise refusal(requested.param, str(exc)) from exc
        try:
            self.matcher(grammar, requested.param)
        except RequestError as exc:
            if (
                requested.kind != "json_schema"
                or (fault := pattern_fault(requested.source)) is None
            ):
                raise
            raise refusal(requested.param, fault) from exc
        openers: Sequence[int | None] = [None]
        if opened_by is not None:
            openers = self._tokenizer.encode(opened_by, add_special_tokens=False)
        if begins_after is None or len(openers) != 1:
            return GrammarConstraint(grammar, None, self, requested.param)
        before = self._prefix(begins_after)
        return GrammarConstraint(grammar, before, self, requested.param, openers[0])

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return a matcher at the beginning of a grammar."""
        with self._lock:
            entry = self._cache.get(grammar)
            if is_first := entry is None:
                entry = self._cache[grammar] = _CacheEntry()
                self._charge(entry, _BYTES_EACH + len(grammar))
            else:
                self._cache.move_to_end(grammar)
        if is_first:
            self._make(grammar, entry)
        result = entry.result.result()  # of the first thread
        if isinstance(result, str):
            raise refusal(param, result)
        return result.deep_copy()

    def fresh_matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return a matcher that shares nothing with any other; raise `RequestError` on failure."""
        result, _ = self._compiled(grammar)
        if isinstance(result, str):
            raise refusal(param, result)
        return result

    def _compiled(self, grammar: str) -> tuple[LLMatcher | str, float]:
        """Return the matcher of a grammar, or its error, and the CPU seconds that it took."""
        return compile_grammar(self._tokens().llguidance_tokenizer, grammar)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokenizer.piece(token_id)

    def _charge(self, entry: _CacheEntry, num_bytes: int) -> None:
        """Count the bytes of an entry, and evict the least recently used ones."""
        entry.num_bytes += num_bytes
        self._num_cache_bytes += num_bytes
        while self._num_cache_bytes > _MAX_CACHE_BYTES and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._num_cache_bytes -= oldest.num_bytes

    def _make(self, grammar: str, entry: _CacheEntry) -> None:
        try:
            result, seconds = self._compiled(grammar)
        except BaseException as exc:
            entry.result.set_exception(exc)
            with self._lock:
                if self._cache.get(grammar) is entry:
                    del self._cache[grammar]
                    self._num_cache_bytes -= entry.num_bytes
            raise
        entry.result.set_result(result)
        with self._lock:
            if self._cache.get(grammar) is entry:
                self._charge(entry, int(seconds * _BYTES_A_SECOND))

    def _prefix(self, text: str) -> UnconstrainedPrefix:
        tokens = self._tokens()
        with self._vocabulary_lock:
            if text not in self._prefixes:
                self._prefixes[text] = unconstrained_prefix(text, tokens, self._vocab_size)
            return self._prefixes[text]

    def _tokens(self) -> GrammarVocabulary:
        """Return the vocabulary, created at first use: most files have no constraint."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = grammar_vocabulary(
                    self._tokenizer, self._vocab_size, self._end_ids
                )
            return self._vocabulary
