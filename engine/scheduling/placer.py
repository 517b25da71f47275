"""Placer: gives waiting sequences slots and pages, and selects sequences to preempt.

A queue selects the next sequence. Whether it may start now depends on the free pages, on state that
a running sequence will soon leave, and on a forecast. This module handles no tensors.
"""

from __future__ import annotations

from ..state.pages import PagePool
from .admission import Admission
from .drafts import Drafts
from .kv_forecast import KVForecast
from .sequence import Sequence, SequenceRequest
from .state_cache import Placement, StateCache
from .table import SequenceTable


class Placer:
    """Places sequences in one table; `try_place` requires a free slot.

    With a `forecast` a row of a file starts only if the KV cache can hold all running sequences to
    their ends.
    """

    def __init__(
        self,
        table: SequenceTable,
        pool: PagePool,
        states: StateCache,
        forecast: KVForecast | None,
        drafts: Drafts | None,
    ) -> None:
        self.forecast = forecast
        self._table = table
        self._pool = pool
        self._states = states
        self._drafts = drafts
        self._num_started = 0
        self._refused: Placement | None = None  # the last one, until a sequence is placed

    def may_join(self, sequence: Sequence) -> bool:
        """Return whether a sequence may run with the others: a suspect of a failed step runs alone.

        A second failure then identifies it as the cause.
        """
        table = self._table
        if not table.num_taken:
            return True
        lone = table.running.tolist() if table.num_taken == 1 else []
        return not sequence.is_suspect and not any(table.sequence(i).is_suspect for i in lone)

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether an interactive sequence starts later, to share pages instead of computing.

        Those of one request arrive together, and all may share a prompt.
        """
        return sequence.is_urgent and self._states.is_in_progress(sequence)

    def try_place(self, queue: Admission) -> int | None:
        """Start the next of a queue, if there is room for it; return its slot."""
        sequence = queue.peek()
        assert sequence is not None
        num_others = self._table.num_taken
        if self._refused and self._states.lasts(self._refused, sequence, num_others):
            return None
        placement = self._states.place(sequence, num_others)
        if not placement.fits:
            self._refused = placement
            return None
        if self._states.is_worth_waiting(placement) or not self._lasts_to_its_end(placement):
            return None
        self._refused = None
        queue.pop()
        num_cached = placement.num_cached * self._table.page_size
        start = num_cached + placement.num_copied
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = start
            sequence.start_order = self._num_started
            self._num_started += 1
        self._states.restore_logprobs(sequence, placement.num_cached)
        slot = self._table.place(sequence, start)
        following = queue.peek() if len(self._states.groups) > 1 else None
        self._states.enter(slot, placement, following)
        if self.forecast is not None:
            self.forecast.enter(slot, num_cached)
        if self._drafts is not None:
            self._drafts.enter(slot)
        return slot

    def note_end(self, sequence: Sequence) -> None:
        """Record a sequence that has ended normally."""
        if self.forecast is not None:
            self.forecast.note_end(sequence)

    def _lasts_to_its_end(self, placement: Placement) -> bool:
        """Return whether the forecast lets a row of a file start without preempting another."""
        sequence = placement.sequence
        if self.forecast is None or sequence.is_urgent:
            return True
        num_needed = next((count for pool, count in placement.needed if pool is self._pool), 0)
        num_cached = placement.num_cached * self._table.page_size
        return self.forecast.fits(sequence, num_cached, num_needed)


def preemptible_slot(table: SequenceTable, request: SequenceRequest) -> int | None:
    """Return the slot to preempt for an urgent sequence: the row that started last.

    If no row of a file runs, it is the newest sequence of the request with the most running ones,
    among those that do not have priority over this request, provided that this request runs none.
    It is None if no such request runs more than one.
    """
    running = table.running
    if len(running) and not table.is_urgent[running[-1]]:
        return int(running[-1])
    assert request.priority is not None
    counts, slots = table.num_running_of, running[::-1]
    if not counts or request.request_id in counts:
        return None
    if (table.priority[slots] < request.priority).any():
        slots = slots[table.priority[slots] >= request.priority]
        names = [table.sequence(slot).request.request_id for slot in slots.tolist()]
        counts = {name: counts[name] for name in names}
    largest = max(counts, key=lambda name: counts[name], default=None)
    if largest is None or counts[largest] == 1:
        return None
    by_start: list[int] = slots.tolist()
    return next(slot for slot in by_start if table.sequence(slot).request.request_id == largest)
