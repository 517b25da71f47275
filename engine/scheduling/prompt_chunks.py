"""Prompt chunks: the tokens of prompts that a step computes (chunked prefill).

A chunk ends at the limit of the step's budget, of the scored rows or of the free pages, and never
inside an image that must be computed as one. This module handles no tensors.
"""

from __future__ import annotations

from .images import whole_stop
from .sequence import Sequence
from .state_cache import StateCache
from .step_budget import StepBudget
from .table import SequenceTable


class PromptChunks:
    """Adds chunks of one table's prompts to a step; returns the stops by slot."""

    def __init__(self, table: SequenceTable, states: StateCache) -> None:
        self._table = table
        self._states = states

    def continue_started(self, budget: StepBudget) -> dict[int, int]:
        """Continue started prompts; return the stops of their spans by slot."""
        table = self._table
        stops: dict[int, int] = {}
        for slot, num_sharing in prompt_shares(table):
            sequence = table.sequence(slot)
            if budget.left(is_urgent=sequence.is_urgent) <= 0:
                break
            if has_rows_for(sequence, budget):
                stops |= self.take(slot, budget, num_sharing)
        return stops

    def take(self, slot: int, budget: StepBudget, num_sharing: int = 1) -> dict[int, int]:
        """Add tokens of a sequence to the step; return the stop of its span by slot, if it has one.

        It leaves their shares to the `num_sharing` sequences that share the budget.
        """
        table = self._table
        sequence = table.sequence(slot)
        request, is_urgent = sequence.request, sequence.is_urgent
        start, total = int(table.num_computed[slot]), int(table.num_tokens[slot])
        most = -(-budget.left(is_urgent=is_urgent) // num_sharing)
        is_scored = request.prompt_logprobs is not None
        stop, scored_from = min(total, start + most), max(start, int(table.first_scored_row[slot]))
        if is_scored:
            stop = min(stop, scored_from + budget.scored_rows)
        stop = self._states.attend(slot, start, whole_stop(request.images, start, stop))
        if stop == start or whole_stop(request.images, start, stop) != stop:
            return {}
        if is_scored:
            budget.scored_rows -= max(0, stop - scored_from)
        budget.spend(stop - start, is_urgent=is_urgent)
        self._states.register(slot, start, stop)
        return {slot: stop}


def has_rows_for(sequence: Sequence, budget: StepBudget) -> bool:
    """Return whether the step may compute more of a prompt, given its scored rows."""
    return sequence.request.prompt_logprobs is None or budget.scored_rows > 0


def prompt_shares(table: SequenceTable) -> list[tuple[int, int]]:
    """Return the slots with started prompts, each with the number of requests that share the step.

    The order is that of their starts. Among interactive sequences one of each request comes first,
    and these share the remaining tokens of a step equally; the others use the rest.
    """
    running = table.running
    pending = table.num_tokens[running] - table.num_computed[running]
    slots: list[int] = running[pending > 1].tolist()
    num_urgent = int(table.is_urgent[slots].sum()) if len(slots) > 1 else 0
    if num_urgent < 2:
        return [(slot, 1) for slot in slots]
    first_of: dict[str, int] = {}
    for slot in slots[:num_urgent]:
        first_of.setdefault(table.sequence(slot).request.request_id, slot)
    sharing = {slot: len(first_of) - place for place, slot in enumerate(first_of.values())}
    return [*sharing.items(), *((slot, 1) for slot in slots if slot not in sharing)]
