"""Grammar constraint on an output, and its state for one sequence: fills the grammar bitmask."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from tidemill.protocol.errors import RequestError

from .grammar import error_summary
from .vocabulary import GrammarVocabulary, bar


@dataclass(frozen=True, slots=True)
class UnconstrainedPrefix:
    """Free output up to and including `text`, such as `</think>`, before a grammar applies.

    The last token of it may end with whitespace after `text`, and nothing else. `open [words]` is
    the bitmask before any of `text`; `crossing[k]` are tokens that would cross its end after its
    first `k` bytes.
    """

    text: bytes
    open: NDArray[np.uint32] = field(compare=False)
    crossing: tuple[NDArray[np.int64], ...] = field(compare=False)

    def fill(self, tail: bytes, mask: NDArray[np.uint32]) -> None:
        """Write the bitmask after text that ends with `tail`."""
        mask[:] = self.open
        for begun in range(1, len(self.text)):
            if tail.endswith(self.text[:begun]):
                bar(mask, self.crossing[begun])


def unconstrained_prefix(
    text: str, tokens: GrammarVocabulary, vocab_size: int
) -> UnconstrainedPrefix:
    """Return the prefix up to a text; no token that ends a sequence may come in it."""
    wanted = text.encode()
    crossing = [
        [i for i, piece in enumerate(tokens.pieces) if _crosses(piece, wanted[begun:], begun)]
        for begun in range(len(wanted))
    ]
    barred = [np.array(ids, np.int64) for ids in crossing]
    open_mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    bar(open_mask, np.array(tokens.end_ids, np.int64))
    bar(open_mask, barred[0])
    return UnconstrainedPrefix(wanted, open_mask, tuple(barred))


def _crosses(piece: bytes, rest: bytes, begun: int) -> bool:
    """Return whether a token crosses the end of a text after its first `begun` bytes."""
    if begun:
        return piece.startswith(rest) and bool(piece[len(rest) :].strip())
    return rest in piece and bool(piece.split(rest, 1)[1].strip())


class MatcherFactory(Protocol):
    """Creates matchers at the beginning of grammars; maps tokens to bytes."""

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return a matcher of a compiled grammar, from the cache if it can."""

    def fresh_matcher(self, grammar: str, param: str) -> LLMatcher:
        """Return a matcher that shares nothing with any other."""

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""


@dataclass(frozen=True, slots=True)
class GrammarConstraint:
    """Constrains an output to a text of a `grammar`, after an optional prefix; a `Constraint`.

    With an `opener` the prefix applies only to sequences that begin with that token. The constraint
    comes from the request field `param`.
    """

    grammar: str
    unconstrained_prefix: UnconstrainedPrefix | None
    matchers: MatcherFactory
    param: str = field(compare=False)
    opener: int | None = None

    def start_state(self) -> GrammarState:
        """Return the state of one sequence before its first token."""
        return GrammarState(self)


class GrammarState:
    """The state of one sequence in its grammar; the matcher is created at first use."""

    __slots__ = ("_constraint", "_matcher", "_may_open", "_tail", "_token_ids")

    def __init__(self, constraint: GrammarConstraint) -> None:
        self._constraint = constraint
        self._matcher: LLMatcher | None = None
        self._token_ids: list[int] = []  # of the grammar
        self._may_open = constraint.opener is not None
        is_after = constraint.unconstrained_prefix is None or self._may_open
        self._tail = None if is_after else b""  # None after the beginning

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write the bitmask of the next token."""
        if self._tail is not None:
            assert self._constraint.unconstrained_prefix is not None
            self._constraint.unconstrained_prefix.fill(self._tail, mask)
            return True
        if not _fill_bitmask(self._started(), mask):
            self._matcher = self._replay()
            if not _fill_bitmask(self._matcher, mask):
                raise self._stuck_error(self._matcher.get_error())
        if self._may_open:
            assert self._constraint.opener is not None
            mask[self._constraint.opener // 32] |= np.uint32(1 << self._constraint.opener % 32)
        return True

    def push(self, token_id: int) -> bool:
        """Accept one generated token; return whether the text is complete."""
        if self._may_open and token_id == self._constraint.opener:
            self._tail = b""
        self._may_open = False
        if self._tail is not None:
            self._push_prefix(token_id)
            return False
        matcher = self._started()
        self._token_ids.append(token_id)
        if not matcher.consume_token(token_id):
            matcher = self._matcher = self._replay()
        if matcher.is_error():
            raise self._stuck_error(matcher.get_error())
        return matcher.is_stopped()

    def fork(self) -> GrammarState:
        """Return an independent copy of this state."""
        forked = copy(self)
        matcher = self._matcher
        forked._token_ids = [*self._token_ids]  # noqa: SLF001 - same class
        forked._matcher = None if matcher is None else matcher.deep_copy()  # noqa: SLF001
        return forked

    def _started(self) -> LLMatcher:
        """Return the matcher; it is new if a draft led from the prefix into the grammar."""
        if self._matcher is None:
            self._matcher = self._constraint.matchers.matcher(
                self._constraint.grammar, self._constraint.param
            )
        return self._matcher

    def _replay(self) -> LLMatcher:
        """Replay all tokens in a fresh matcher.

        Other sequences may have used up the limits of a shared one, and a row must not depend on
        them.
        """
        matcher = self._constraint.matchers.fresh_matcher(
            self._constraint.grammar, self._constraint.param
        )
        matcher.consume_tokens(self._token_ids)
        return matcher

    def _push_prefix(self, token_id: int) -> None:
        """Accept a token of the prefix; the grammar begins after its last one."""
        assert self._constraint.unconstrained_prefix is not None
        assert self._tail is not None
        wanted = self._constraint.unconstrained_prefix.text
        tail = self._tail + self._constraint.matchers.piece(token_id)
        self._tail = None if wanted in tail else tail[-len(wanted) :]

    def _stuck_error(self, error: str) -> RequestError:
        return RequestError(
            f"`{self._constraint.param}` allows nothing more after {len(self._token_ids)} tokens: "
            f"{error_summary(error)}",
            param=self._constraint.param,
            code="constraint_cannot_be_held",
        )


def _fill_bitmask(matcher: LLMatcher, mask: NDArray[np.uint32]) -> bool:
    """Fill a bitmask; return whether the matcher is still valid."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return not matcher.is_error()
