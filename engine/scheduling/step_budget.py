"""Step budget: limits the tokens of batch rows in a step while interactive requests come.

Such a request waits for the step in progress when it arrives, and then for its own. Its own step
contains no rows of files. While such requests come, other steps are made shorter than their own, so
that a first token takes at most half as long again as it does without rows. Rows that have started
still advance: one of eight steps includes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_SCORED_ROWS = 256
"""Scoring a prompt needs the logits of all its tokens: `[rows, vocabulary]` must stay small."""

MOST_STEPS_ALONE = 7
"""Limit on consecutive steps without rows of files."""

REMEMBERED_SECONDS = 60.0
"""Time after a request during which the next one is expected."""

LEAST_TOKENS = 64
"""Steps with fewer tokens are hardly any shorter."""

_FIRST_TOKENS = 256.0
# Share of the duration of a request's own step; on average a request arrives in mid-step.
_SHARE = 0.75
_FADING = 0.95  # per such step, applied to the longest remembered duration
_MOST_CHANGE = 1.25


@dataclass(slots=True)
class StepBudget:
    """The remaining tokens of a step: for all sequences, and for rows of files.

    `scored_rows` is the remaining number of prompt tokens to score.
    """

    of_all: int
    of_lines: int
    scored_rows: int

    def left(self, *, is_urgent: bool) -> int:
        """Return the number of tokens that a sequence may use."""
        return self.of_all if is_urgent else min(self.of_all, self.of_lines)

    def spend(self, num_tokens: int, *, is_urgent: bool) -> None:
        """Subtract `num_tokens`."""
        self.of_all -= num_tokens
        if not is_urgent:
            self.of_lines -= num_tokens


class LineTokenLimit:
    """Limit on the tokens of batch rows in a step, learned from step times in seconds of `clock`.

    It starts with `tokens` when interactive requests are expected.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, tokens: float = _FIRST_TOKENS
    ) -> None:
        self._clock = clock
        self._expected_until = float("-inf")
        self._tokens = tokens
        self._own_seconds = 0.0  # the longest step for a first token, which decays
        self._num_alone = 0

    @property
    def is_expecting(self) -> bool:
        """Return whether interactive requests have arrived recently."""
        return self._clock() < self._expected_until

    def expect(self) -> None:
        """Record the arrival of an interactive request."""
        self._expected_until = self._clock() + REMEMBERED_SECONDS

    def tokens(self, most: int, *, is_awaited: bool) -> int:
        """Return the token limit of rows in the next step, which has room for `most`.

        `is_awaited` is True if the step advances an interactive request's first token.
        """
        self._num_alone = self._num_alone + 1 if is_awaited else 0
        if 0 < self._num_alone <= MOST_STEPS_ALONE:
            return 0
        self._num_alone = 0
        return min(most, int(self._tokens)) if self.is_expecting else most

    def note(self, seconds: float, *, num_line_tokens: int, is_first: bool) -> None:
        """Record a step's duration; `is_first` is True if it was for a first token."""
        if not num_line_tokens:
            if is_first:
                self._own_seconds = max(seconds, _FADING * self._own_seconds)
            return
        wanted = _SHARE * self._own_seconds
        if not wanted or not self.is_expecting:
            return
        is_bounded = _MOST_CHANGE * num_line_tokens >= self._tokens
        if is_bounded or seconds > wanted:
            change = min(_MOST_CHANGE, max(1 / 2, wanted / max(seconds, 1e-9)))
            self._tokens = max(LEAST_TOKENS, self._tokens * change)


# Delay and amount of growth after a step that did not fit into memory.
GROW_AFTER_STEPS = 64
GROWTH = 1 / 8


class StepTokenLimit:
    """Token limit of a step: at most `most`, or as much as memory allows.

    `tokens` is halved after a step that did not fit, and then slowly increased.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self._most = most
        self._before: int | None = None  # the limit before the current failures
        self._num_fitting = 0

    def lower(self, num_tokens: int) -> None:
        """Halve the tokens of a step that did not fit, but allow at least one."""
        if self._before is None:
            self._before = self.tokens
        self._num_fitting = 0
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)

    def restore(self) -> None:
        """Restore the limit before the last failures, which had another cause than the size."""
        if self._before is not None:
            self.tokens, self._before = self._before, None

    def note_fit(self) -> None:
        """Count a step that fitted; enough of them in a row raise the limit a little."""
        self._before = None
        if self.tokens == self._most:
            return
        self._num_fitting += 1
        if self._num_fitting == GROW_AFTER_STEPS:
            self._num_fitting = 0
            self.tokens = min(self._most, self.tokens + max(1, int(self.tokens * GROWTH)))
