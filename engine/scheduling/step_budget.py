"""Step budget: caps batch tokens of a step while interactive requests wait for first tokens.

Such a request waits for the step that is computed when it comes, then for its own. No line has a
share in the latter. The former are made shorter than the latter while such requests come: so that a
first token takes half as long again as it does where no lines run, or less. A line that started
goes on all the same: of eight steps one takes lines along.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_SCORED_ROWS = 256
"""Scoring a prompt takes the logits of all its tokens: `[rows, vocabulary]` must stay small."""

MOST_STEPS_ALONE = 7
"""So many steps, one after another, are taken without lines."""

REMEMBERED_SECONDS = 60.0
"""For so long after a request the next one is expected."""

LEAST_TOKENS = 64
"""Steps of fewer tokens are hardly any shorter."""

_FIRST_TOKENS = 256.0
_SHARE = 0.75  # of the time that a request's own step takes; one comes in the middle, mostly
_FADING = 0.95  # with each such step, of the longest that is remembered
_MOST_CHANGE = 1.25


@dataclass(slots=True)
class StepBudget:
    """The tokens that a step may still take: of all sequences, and of lines of files among them.

    `scored_rows` are the tokens of prompts that it may still score.
    """

    of_all: int
    of_lines: int
    scored_rows: int

    def left(self, *, is_urgent: bool) -> int:
        """Return how many a sequence may have."""
        return self.of_all if is_urgent else min(self.of_all, self.of_lines)

    def spend(self, num_tokens: int, *, is_urgent: bool) -> None:
        """Take so many."""
        self.of_all -= num_tokens
        if not is_urgent:
            self.of_lines -= num_tokens


class LineTokenLimit:
    """Cap on the tokens of batch lines in a step, learned from step times; `clock` gives seconds.

    It begins with `tokens` where requests are expected.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, tokens: float = _FIRST_TOKENS
    ) -> None:
        self._clock = clock
        self._expected_until = float("-inf")
        self._tokens = tokens
        self._own_seconds = 0.0  # of the longest step that a first token took, which fades
        self._num_alone = 0

    @property
    def is_expecting(self) -> bool:
        """Say whether requests that somebody waits for have come lately."""
        return self._clock() < self._expected_until

    def expect(self) -> None:
        """Take note of a request that somebody waits for."""
        self._expected_until = self._clock() + REMEMBERED_SECONDS

    def tokens(self, most: int, *, is_awaited: bool) -> int:
        """Return how many tokens lines may have in the next step, which has room for `most`.

        `is_awaited` says that the step brings a first token nearer that somebody waits for.
        """
        self._num_alone = self._num_alone + 1 if is_awaited else 0
        if 0 < self._num_alone <= MOST_STEPS_ALONE:
            return 0
        self._num_alone = 0
        return min(most, int(self._tokens)) if self.is_expecting else most

    def note(self, seconds: float, *, num_line_tokens: int, is_first: bool) -> None:
        """Learn from a step that took so long; `is_first` says that it was for a first token."""
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


# How soon, and by how much, steps grow again after one that did not fit into memory.
GROW_AFTER_STEPS = 64
GROWTH = 1 / 8


class StepTokenLimit:
    """Token limit of a step: at most `most`, or as many as memory has room for.

    `tokens` is halved when a step did not fit, then slowly raised.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self._most = most
        self._before: int | None = None  # what was allowed before the failures now going on
        self._num_fitting = 0

    def lower(self, num_tokens: int) -> None:
        """Allow half of the tokens of a step that did not fit, but always one."""
        if self._before is None:
            self._before = self.tokens
        self._num_fitting = 0
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)

    def restore(self) -> None:
        """Allow what was allowed before the last failures: their owner was another than size."""
        if self._before is not None:
            self.tokens, self._before = self._before, None

    def note_fit(self) -> None:
        """Count a step that fitted; a row of them raises the bound a little."""
        self._before = None
        if self.tokens == self._most:
            return
        self._num_fitting += 1
        if self._num_fitting == GROW_AFTER_STEPS:
            self._num_fitting = 0
            self.tokens = min(self._most, self.tokens + max(1, int(self.tokens * GROWTH)))
