"""Drafts: possible next tokens of sequences, verified by the step that computes them.

In speculative decoding a step appends drafts to a sequence's last token, and samples a token after
each as if it were computed alone. Drafts after a wrong one are dropped.
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
    """Drafts possible next tokens of one table's sequences, for steps to verify."""

    def enter(self, slot: int) -> None:
        """Record that another sequence has entered a slot."""

    def draft(self, slots: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write drafts after the tokens of slots in the table, at most `most` for each.

        Returns the number of drafts, `[slots]`. The ids of all tokens before them are known.
        """

    def note_accepted(
        self,
        slots: NDArray[np.int64],
        num_drafts: NDArray[np.int64],
        num_accepted: NDArray[np.int64],
    ) -> None:
        """Record the number of accepted drafts of slots."""

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""

    def note_end(self, sequence: Sequence) -> None:
        """Record a sequence that has ended normally."""


class Drafts:
    """Drafts of one table's sequences, from a drafter."""

    def __init__(
        self, table: SequenceTable, pool: PagePool, states: StateCache, drafter: Drafter
    ) -> None:
        self._table = table
        self._pool = pool
        self._states = states
        self._drafter = drafter
        self.num_tokens = self.num_accepted = 0

    def enter(self, slot: int) -> None:
        """Record that another sequence has entered a slot."""
        self._drafter.enter(slot)

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step."""
        self._drafter.note_seconds(plan, seconds)

    def note_end(self, sequence: Sequence) -> None:
        """Record a sequence that has ended normally."""
        self._drafter.note_end(sequence)

    def verify(
        self, plan: StepPlan, token_ids: NDArray[np.int64], is_broken: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Mark the ids of `plan.sampled` that follow no wrong draft and no broken row."""
        slots, places = plan.sampled, plan.sampled_places
        ends = np.minimum(self._table.num_known_ids[slots] + places, self._table.max_model_len - 1)
        is_miss = (token_ids != self._table.tokens[slots, ends]) | is_broken
        num_misses = np.cumsum(is_miss) - is_miss  # before each
        valid: NDArray[np.bool_] = num_misses == num_misses[np.arange(len(slots)) - places]
        return valid

    def forget(self, plan: StepPlan, taken: NDArray[np.bool_]) -> None:
        """Continue sequences after their last correct draft."""
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
        """Draft tokens for decodes; return the slots that have drafts, and their stops.

        Drafts use no page that a sequence may need soon, and leave half of the step to prompts.
        """
        table = self._table
        if self._pool.num_free < 2 * len(table.running):
            return {}
        slots = decodes[table.num_known_ids[decodes] == table.num_tokens[decodes]]
        if not len(slots):
            return {}
        counts = self._drafter.draft(slots, table.max_tokens[slots] - table.num_tokens[slots] - 1)
        stops: dict[int, int] = {}
        # The maximum number of logit rows in a step without drafts.
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
