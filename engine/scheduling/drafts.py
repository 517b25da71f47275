"""Drafts: tokens that sequences may go on with, verified by the step that computes them.

Speculative decoding: a step takes drafts behind a sequence's last token, each followed by a token
that is chosen as if it had come alone. Those behind a wrong draft are forgotten.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..state.pages import PagePool
from .sequence import Sequence
from .state_cache import StateCache
from .step_budget import MAX_SCORED_ROWS, StepBudget
from .step_plan import StepPlan
from .table import SequenceTable


class Drafter(Protocol):
    """Drafts tokens that sequences of one table may go on with, for steps to verify."""

    def enter(self, slot: int) -> None:
        """Take note that another sequence has entered a slot."""

    def draft(self, slots: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write drafts behind the tokens of slots in the table, at most so many of each.

        Returns how many there are, `[slots]`. The ids of all tokens before them are known.
        """

    def note_accepted(
        self,
        slots: NDArray[np.int64],
        num_drafts: NDArray[np.int64],
        num_accepted: NDArray[np.int64],
    ) -> None:
        """Learn how many of the drafts of slots were accepted."""

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Learn from how long a step took."""

    def note_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended by itself."""


class Drafts:
    """Drafts of one table's sequences, by a drafter."""

    def __init__(
        self, table: SequenceTable, pool: PagePool, states: StateCache, drafter: Drafter
    ) -> None:
        self._table = table
        self._pool = pool
        self._states = states
        self._drafter = drafter
        self.num_tokens = self.num_accepted = 0

    def enter(self, slot: int) -> None:
        """Take note that another sequence has entered a slot."""
        self._drafter.enter(slot)

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Learn from how long a step took."""
        self._drafter.note_seconds(plan, seconds)

    def note_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended by itself."""
        self._drafter.note_end(sequence)

    def verify(
        self, plan: StepPlan, token_ids: NDArray[np.int64], is_broken: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Say which ids of `plan.sampled` follow no wrong draft, nor one of a broken row."""
        slots, places = plan.sampled, plan.sampled_places
        ends = np.minimum(self._table.num_known_ids[slots] + places, self._table.max_model_len - 1)
        is_miss = (token_ids != self._table.tokens[slots, ends]) | is_broken
        num_misses = np.cumsum(is_miss) - is_miss  # before each
        valid: NDArray[np.bool_] = num_misses == num_misses[np.arange(len(slots)) - places]
        return valid

    def forget(self, plan: StepPlan, taken: NDArray[np.bool_]) -> None:
        """Let sequences go on behind the drafts that were right."""
        table, is_drafted = self._table, plan.num_drafts > 0
        counts = plan.num_sampled[plan.samples]
        num_taken = np.add.reduceat(taken, np.cumsum(counts) - counts)
        is_drafted = is_drafted[plan.samples]
        drafted, num_taken = plan.slots[plan.samples][is_drafted], num_taken[is_drafted]
        table.is_verifying[drafted] = False
        table.num_tokens[drafted] = table.num_known_ids[drafted]
        table.num_computed[drafted] = table.num_known_ids[drafted] - 1
        table.is_fully_launched[drafted] = table.num_tokens[drafted] >= table.max_tokens[drafted]
        num_drafts = plan.num_drafts[plan.samples][is_drafted]
        num_accepted = np.minimum(np.maximum(num_taken - 1, 0), num_drafts)
        self.num_tokens += int(num_drafts.sum())
        self.num_accepted += int(num_accepted.sum())
        self._drafter.note_accepted(drafted, num_drafts, num_accepted)

    def plan(self, decodes: NDArray[np.int64], budget: StepBudget) -> dict[int, int]:
        """Draft tokens for decodes; return the slots of those with drafts, and where they stop.

        Drafts take no page that a sequence may need soon, and leave prompts half of the step.
        """
        table = self._table
        if self._pool.num_free < 2 * len(table.running):
            return {}
        slots = decodes[table.num_known_ids[decodes] == table.num_tokens[decodes]]
        if not len(slots):
            return {}
        counts = self._drafter.draft(slots, table.max_tokens[slots] - table.num_tokens[slots] - 1)
        stops: dict[int, int] = {}
        # As many rows of logits as a step may have without any.
        left = len(table.sequences) + MAX_SCORED_ROWS - len(decodes)
        left = min(left, min(budget.of_all, budget.of_lines) // 2)
        for slot, count in zip(slots[counts > 0].tolist(), counts[counts > 0], strict=True):
            start = int(table.num_computed[slot])
            stop = self._states.attend(slot, start, start + 1 + min(int(count), left))
            if stop > start + 1:
                left -= stop - start - 1
                budget.spend(stop - start - 1, is_urgent=bool(table.is_urgent[slot]))
                stops[slot] = stop
        return stops
