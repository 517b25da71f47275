"""Prompt chunks: the tokens of prompts that a step computes (chunked prefill).

A chunk ends where the step's budget, the scored rows or the free pages end, and never inside an
image that must be computed as one. No tensor is touched here.
"""

from __future__ import annotations

from .images import whole_stop
from .sequence import Sequence
from .state_cache import StateCache
from .step_budget import StepBudget
from .table import SequenceTable


class PromptChunks:
    """Takes chunks of prompts of one table into a step; their slots come with where they stop."""

    def __init__(self, table: SequenceTable, states: StateCache) -> None:
        self._table = table
        self._states = states

    def continue_started(self, budget: StepBudget) -> dict[int, int]:
        """Go on with prompts that are under way; return slots with where their spans stop."""
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
        """Take tokens of a sequence into the step; return it with where its span stops, if it does.

        It leaves their shares to the others of so many that share what is left.
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
    """Say whether the step may compute more of a prompt: all of it, or a few scored rows."""
    return sequence.request.prompt_logprobs is None or budget.scored_rows > 0


def prompt_shares(table: SequenceTable) -> list[tuple[int, int]]:
    """Return the slots with prompts under way, and among how many requests each shares a step.

    Those that started first come in front. Where somebody waits for them, one of each request does,
    and these share alike what tokens a step has left; others take what is left then.
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
