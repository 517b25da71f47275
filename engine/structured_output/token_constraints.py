"""Token constraints: allowed tokens, bad words, and several constraints as one.

A bad word is the sequence of its tokens: the last one is masked behind the others, as in vLLM. The
same letters may still come in other tokens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..scheduling.sequence import Constraint, ConstraintState
from .vocabulary import allow, bar

_ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """A `Constraint`: only these tokens may come, at any place."""

    token_ids: frozenset[int]

    def start_state(self) -> AllowedTokensState:
        """Return the state of one sequence before its first token."""
        return AllowedTokensState(self)


class AllowedTokensState:
    """The state of one sequence under its `AllowedTokens`: the same bitmask at every place."""

    __slots__ = ("_mask", "_token_ids")

    def __init__(self, wanted: AllowedTokens) -> None:
        self._token_ids = wanted.token_ids
        self._mask: NDArray[np.uint32] | None = None

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write the tokens into `mask [words]`."""
        if self._mask is None:
            self._mask = np.zeros_like(mask)
            allow(self._mask, np.fromiter(self._token_ids, np.int64))
        mask[:] = self._mask
        return True

    def push(self, _: int) -> bool:
        """Accept a token; any of the allowed ones may follow."""
        return False

    def fork(self) -> AllowedTokensState:
        """Return the same state: it never changes."""
        return self


@dataclass(frozen=True, slots=True)
class BadWords:
    """A `Constraint`: none of these words, each a list of at least one token, is completed."""

    words: frozenset[tuple[int, ...]]

    def start_state(self) -> BadWordsState:
        """Return the state of one sequence before its first token."""
        return BadWordsState(self)


class BadWordsState:
    """The state of one sequence under its `BadWords`."""

    __slots__ = ("_last_after", "_lengths", "_tail")

    def __init__(self, wanted: BadWords) -> None:
        self._last_after: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for *begun, last in wanted.words:
            self._last_after[tuple(begun)].add(last)
        self._lengths = sorted({len(begun) for begun in self._last_after})
        self._tail: deque[int] = deque(maxlen=self._lengths[-1])

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Mask the tokens that would complete a word; False where none would."""
        tail = tuple(self._tail)
        bad: set[int] = set()
        for length in self._lengths:
            if length <= len(tail):
                bad |= self._last_after.get(tail[len(tail) - length :], set())
        if not bad:
            return False
        mask[:] = _ALL
        bar(mask, np.fromiter(bad, np.int64))
        return True

    def push(self, token_id: int) -> bool:
        """Accept one generated token; the sequence never ends by it."""
        self._tail.append(token_id)
        return False

    def fork(self) -> BadWordsState:
        """Return a state that goes on from here by itself."""
        forked = copy(self)
        forked._tail = self._tail.copy()  # noqa: SLF001 - of its own kind
        return forked


@dataclass(frozen=True, slots=True)
class AllOf:
    """A `Constraint`: all of these; where they conflict, the earlier ones prevail."""

    constraints: tuple[Constraint, ...]

    def start_state(self) -> AllOfState:
        """Return the state of one sequence before its first token."""
        return AllOfState([constraint.start_state() for constraint in self.constraints])


class AllOfState:
    """The state of one sequence under several constraints."""

    __slots__ = ("_watches",)

    def __init__(self, watches: list[ConstraintState]) -> None:
        self._watches = watches

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write the tokens that all of them allow."""
        is_held = False
        for watch in self._watches:
            if not is_held:
                is_held = watch.fill(mask)
                continue
            other = np.empty_like(mask)
            if watch.fill(other) and (mask & other).any():
                mask &= other
        return is_held

    def push(self, token_id: int) -> bool:
        """Accept one generated token, and say whether one of them lets nothing follow."""
        are_whole = [watch.push(token_id) for watch in self._watches]
        return any(are_whole)

    def fork(self) -> AllOfState:
        """Return a state that goes on from here by itself."""
        return AllOfState([watch.fork() for watch in self._watches])


def all_of(constraints: Iterable[Constraint | None]) -> Constraint | None:
    """Return the constraints that are given as one; None where there is none."""
    given = tuple(constraint for constraint in constraints if constraint is not None)
    return AllOf(given) if len(given) > 1 else next(iter(given), None)
