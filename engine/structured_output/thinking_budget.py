"""Thinking budget: a limit on reasoning tokens, after which the end of reasoning is forced."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A `Constraint`: `num_tokens` of reasoning, and then the tokens `ends`, one after another.

    `ends` are the tokens of the closing mark. With an `opener` there is reasoning only if it is the
    first token; without one a sequence begins with reasoning.
    """

    num_tokens: int
    ends: tuple[int, ...]
    opener: int | None
    tokenizer: Tokenizer = field(compare=False, repr=False)

    def start_state(self) -> ThinkingBudgetState:
        """Return the state of one sequence before its first token."""
        return ThinkingBudgetState(self)


class ThinkingBudgetState:
    """The state of one sequence under its `ThinkingBudget`."""

    __slots__ = (
        "_budget",
        "_is_thinking",
        "_mark",
        "_may_open",
        "_num_ended",
        "_num_left",
        "_tail",
    )

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._may_open = budget.opener is not None
        self._is_thinking = not self._may_open
        self._num_left = budget.num_tokens
        self._num_ended = 0  # forced tokens so far
        self._mark = budget.tokenizer.text_bytes(budget.ends, skip_special_tokens=False)
        self._tail = b""

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write the bitmask of the forced token; return False if any token may come."""
        if not self._is_thinking or self._num_left > 0:
            return False
        token_id = self._budget.ends[self._num_ended]
        mask[:] = 0
        mask[token_id // 32] = np.uint32(1 << token_id % 32)
        return True

    def push(self, token_id: int) -> bool:
        """Accept one generated token; it never ends the sequence."""
        if self._may_open:
            self._may_open = False
            self._is_thinking = token_id == self._budget.opener
            return False
        if not self._is_thinking:
            return False
        if self._num_left > 0:
            self._num_left -= 1
        else:
            self._num_ended += 1
        tail = self._tail + self._budget.tokenizer.piece(token_id)
        self._is_thinking = self._mark not in tail
        self._tail = tail[-len(self._mark) :]
        return False

    def fork(self) -> ThinkingBudgetState:
        """Return an independent copy of this state."""
        return copy(self)
