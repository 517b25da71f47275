"""How many tokens one step may hold: as many as were asked for, or as memory has room for."""

from __future__ import annotations

GROW_AFTER_STEPS = 64
GROWTH = 1 / 8


class StepBound:
    """`tokens`, at most `most`: halved when a step did not fit into memory, then slowly raised."""

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
