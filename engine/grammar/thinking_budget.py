"""A bound on thinking: after so many tokens its end must come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A `Constraint`: `num_tokens` of thinking, and then the tokens `ends`, one after the other.

    `ends` is how the tokenizer writes the mark that ends it. With an `opener` there is thinking
    only where that is the first token; without one a sequence begins inside it.
    """

    num_tokens: int
    ends: tuple[int, ...]
    opener: int | None
    tokenizer: Tokenizer = field(compare=False, repr=False)

    def begin(self) -> ThinkingBudgetWatch:
        """Begin to hold one sequence to it."""
        return ThinkingBudgetWatch(self)


class ThinkingBudgetWatch:
    """Holds one sequence to its `ThinkingBudget`."""

    __slots__ = ("_asked", "_is_thinking", "_mark", "_may_open", "_num_ended", "_num_left", "_tail")

    def __init__(self, asked: ThinkingBudget) -> None:
        self._asked = asked
        self._may_open = asked.opener is not None
        self._is_thinking = not self._may_open
        self._num_left = asked.num_tokens
        self._num_ended = 0  # tokens of the end that had to come and did
        self._mark = asked.tokenizer.text_bytes(asked.ends, skip_special_tokens=False)
        self._tail = b""

    def fill(self, mask: NDArray[np.uint32]) -> bool:
        """Write the one token that must come; False where any may."""
        if not self._is_thinking or self._num_left > 0:
            return False
        token_id = self._asked.ends[self._num_ended]
        mask[:] = 0
        mask[token_id // 32] = np.uint32(1 << token_id % 32)
        return True

    def push(self, token_id: int) -> bool:
        """Append one generated token, behind which something always may come."""
        if self._may_open:
            self._may_open = False
            self._is_thinking = token_id == self._asked.opener
            return False
        if not self._is_thinking:
            return False
        if self._num_left > 0:
            self._num_left -= 1
        else:
            self._num_ended += 1
        tail = self._tail + self._asked.tokenizer.piece(token_id)
        self._is_thinking = self._mark not in tail
        self._tail = tail[-len(self._mark) :]
        return False
