"""How many tokens a step may hold: less after one that did not fit, then slowly more."""

from __future__ import annotations

# How soon, and by how much, steps grow again after one that did not fit into memory.
GROW_AFTER_STEPS = 64
GROWTH = 1 / 8


class StepBound:
    """How many tokens a step may hold: at most `most`, or as many as memory has room for.

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
