"""Token constraints: allowed tokens, bad words, and several constraints as one.

A bad word is the sequence of its tokens: the last one is masked after the others, as in vLLM. The
same letters may still appear as other tokens.
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
    """A `Constraint`: only these tokens may come, at any position."""

    token_ids: frozenset[int]

    def start_state(self) -> AllowedTokensState:
        """Return the state of one sequence before its first token."""
        return AllowedTokensState(self)


class AllowedTokensState:
    """The state of one sequence under its `AllowedTokens`: the same bitmask at every position."""

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
        """Mask the tokens that would complete a word; return False if none would."""
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
        """Accept one generated token; it never ends the sequence."""
        self._tail.append(token_id)
        return False

    def fork(self) -> BadWordsState:
        """Return an independent copy of this state."""
        forked = copy(self)
        forked._tail = self._tail.copy()  # noqa: SLF001 - same class
        return forked


@dataclass(frozen=True, slots=True)
class AllOf:
    """A `Constraint` that combines several; in a conflict the earlier ones prevail."""

    constraints: tuple[Constraint, ...]

    def start_state(self) -> AllOfState:
        """Return the state of one sequence before its first token."""
        return AllOfState([constraint.start_state() for constraint in self.constraints])


class AllOfState:
    """The state of one sequence under several constraints."""

    __slots__ = ("_states",)

    def __init__(self, states: list[ConstraintState]) -> None:
        self._states = states

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write the tokens that all of them allow."""
        is_masked = False
        for state in self._states:
            if not is_masked:
                is_masked = state.fill(mask)
                continue
            other = np.empty_like(mask)
            if state.fill(other) and (mask & other).any():
                mask &= other
        return is_masked

    def push(self, token_id: int) -> bool:
        """Accept one generated token; return whether the output is complete under any of them."""
        are_whole = [state.push(token_id) for state in self._states]
        return any(are_whole)

    def fork(self) -> AllOfState:
        """Return an independent copy of this state."""
        return AllOfState([state.fork() for state in self._states])


@dataclass(frozen=True, slots=True)
class Resumed:
    """A `Constraint` on the tokens that follow the first `token_ids` of an output."""

    constraint: Constraint
    token_ids: tuple[int, ...]

    def start_state(self) -> ResumedState:
        """Return the state of one sequence after these tokens."""
        return ResumedState(self.constraint.start_state(), self.token_ids)


class ResumedState:
    """The state of one sequence under `Resumed`; its first tokens are replayed at first use."""

    __slots__ = ("_state", "_token_ids")

    def __init__(self, state: ConstraintState, token_ids: tuple[int, ...]) -> None:
        self._state = state
        self._token_ids = token_ids

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write the bitmask of the next token."""
        for token_id in self._token_ids:
            self._state.fill(mask)
            self._state.push(token_id)
        self._token_ids = ()
        return self._state.fill(mask)

    def push(self, token_id: int) -> bool:
        """Accept one generated token; return whether the output is complete."""
        return self._state.push(token_id)

    def fork(self) -> ResumedState:
        """Return an independent copy of this state."""
        return ResumedState(self._state.fork(), self._token_ids)


def all_of(constraints: Iterable[Constraint | None]) -> Constraint | None:
    """Return the constraints as one; None if there are none."""
    present = tuple(constraint for constraint in constraints if constraint is not None)
    return AllOf(present) if len(present) > 1 else next(iter(present), None)
