"""Scheduler: continuous batching with chunked prefill, under a token budget and a page pool.

Every running sequence with one token to compute gets it. The rest of the budget goes to prompts, in
chunks, oldest first. Then waiting sequences are admitted while slots and pages last, in a
policy's order. No chunk splits an image that must be computed as one; a step may exceed its budget
for it. If a sequence needs a page and none is free, the one that started last releases all of its
pages and waits to be recomputed, so that the one that started first always advances. This module
handles no tensors.

Interactive sequences have priority over rows of files in all of this. Rows are preempted for them,
and use only the part of a step that the line limit leaves them. Interactive sequences start in the
order of their priorities; one with the highest number is preempted first, but only for memory that
running sequences need.

Launching a step moves the counts; its results are collected later, oldest step first. In between
the next step may be planned, with tokens whose ids are still unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from ..state.groups import Pages, StateGroup
from ..state.pages import PagePool
from .admission import Admission, ArrivalOrder
from .drafts import Drafter, Drafts
from .kv_forecast import KVForecast
from .placer import Placer, preemptible_slot
from .prompt_chunks import PromptChunks, has_rows_for
from .sequence import Sequence
from .state_cache import StateCache
from .step_budget import MAX_SCORED_ROWS, LineTokenLimit, StepBudget, StepTokenLimit
from .step_plan import StepPlan
from .table import SequenceTable

# A failure may be temporary, or caused by the batch size; a repeated one has a culprit.
MAX_FAILURES_IN_COMPANY = 3


class Scheduler:
    """Plans steps over one table and one pool; `add` is called between steps.

    `admission` selects the next sequence to start, but suspects of a failed step come first. If the
    device `keeps_ids`, no step waits for the ids that penalties need. `groups` contain the layers
    whose state is not the table's full pages. With a `forecast` rows of files start only if the KV
    cache can hold all running sequences to their ends. A step scores at most `max_scored_rows`
    prompt tokens. With a `drafter` it verifies drafts, which layers must be able to forget: the
    state of all `groups` must then be pages. For `fewest_copied`, see `StateCache`.
    """

    def __init__(
        self,
        table: SequenceTable,
        pool: PagePool,
        admission: Admission,
        max_num_batched_tokens: int,
        line_limit: LineTokenLimit | None = None,
        *,
        keeps_ids: bool = False,
        groups: Iterable[StateGroup] = (),
        forecast: KVForecast | None = None,
        max_scored_rows: int = MAX_SCORED_ROWS,
        drafter: Drafter | None = None,
        fewest_copied: int = 0,
    ) -> None:
        self.table = table
        self.pool = pool
        self.num_preemptions = 0
        self.step_limit = StepTokenLimit(max_num_batched_tokens)
        self.line_limit = LineTokenLimit() if line_limit is None else line_limit
        self._admission = admission
        self._keeps_ids = keeps_ids
        self._max_scored_rows = max_scored_rows
        self._suspects = ArrivalOrder()
        self._num_in_flight = 0
        pages = Pages(pool, table.page_size, table.pages, table.num_pages, table.sources)
        self._states = StateCache(table, [pages, *groups], fewest_copied)
        self.drafts = None if drafter is None else Drafts(table, pool, self._states, drafter)
        self._prompts = PromptChunks(table, self._states)
        self._placer = Placer(table, pool, self._states, forecast, self.drafts)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return whether a sequence that grows to `num_tokens` fits alone."""
        return self._states.can_ever_fit(num_tokens)

    @property
    def num_waiting(self) -> int:
        """Return the number of sequences that wait to start or to be recomputed."""
        return len(self._suspects) + len(self._admission)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has just arrived."""
        if sequence.is_urgent:
            self.line_limit.expect()
        self._admission.add(sequence)

    def plan(self) -> StepPlan | None:
        """Return the next step; None if it must wait for one in flight or has nothing to do."""
        decodes = self._decodes()
        if self._num_in_flight and self._must_wait(decodes):
            return None
        while self._is_blocked() and len(self.table.running) > 1:
            self.preempt(int(self.table.running[-1]))
        self._admit_urgent()
        max_line_tokens = self.line_limit.tokens(
            self.step_limit.tokens, is_awaited=self._is_awaited()
        )
        decodes = self._extended(self._limit_lines(max_line_tokens, self._decodes()))
        budget = StepBudget(self.step_limit.tokens, max_line_tokens, self._max_scored_rows)
        num_urgent = int(self.table.is_urgent[decodes].sum())
        budget.spend(num_urgent, is_urgent=True)
        budget.spend(len(decodes) - num_urgent, is_urgent=False)
        has_prompts = len(decodes) < len(self.table.running)
        stops = {} if self.drafts is None else self.drafts.plan(decodes, budget)
        if stops:
            decodes = decodes[~np.isin(decodes, list(stops))]
        stops |= self._prompts.continue_started(budget) if has_prompts else {}
        stops |= self._admit(budget)
        return self._laid_out(decodes, stops) if len(decodes) or stops else None

    def launch(self, plan: StepPlan) -> None:
        """Advance the counts of a launched step: each of its samples is one more token."""
        table = self.table
        self._num_in_flight += 1
        table.num_in_flight[plan.slots] += 1
        table.num_computed[plan.slots] = plan.stops
        table.has_begun[plan.slots] = True
        table.is_verifying[plan.slots] = plan.num_drafts > 0
        slots = plan.slots[plan.samples]
        table.num_tokens[slots] += table.num_tokens[slots] < table.max_tokens[slots]
        table.is_fully_launched[slots] = table.num_tokens[slots] >= table.max_tokens[slots]

    def collect(
        self, plan: StepPlan, token_ids: NDArray[np.int64], is_valid: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Record the results of the oldest step in flight: an id for each of `plan.sampled`.

        Returns a mask of the ids that were taken. The others belong to sequences that have since
        ended, have no room for a token, or are not valid.
        """
        table = self.table
        self._land(plan)
        slots = plan.sampled
        ends = table.num_known_ids[slots] + (plan.sampled_places if plan.has_drafts else 0)
        taken = is_valid & (ends < table.max_tokens[slots]) & table.is_running[slots]
        grown = slots[taken]
        table.tokens[grown, ends[taken]] = token_ids[taken]
        if self.drafts is not None and plan.has_drafts:
            np.add.at(table.num_known_ids, grown, 1)
            self.drafts.forget(plan, taken)
        else:
            table.num_known_ids[grown] += 1
        is_running = table.is_running[plan.slots]
        slots = plan.slots[is_running]
        self._states.settle(slots, np.minimum(plan.stops[is_running], table.num_computed[slots]))
        return taken

    def undo(self, plan: StepPlan) -> None:
        """Revert the counts of a launched step that is lost; newest step first."""
        table = self.table
        table.num_tokens[plan.slots] = table.num_known_ids[plan.slots]
        table.is_fully_launched[plan.slots] = table.is_verifying[plan.slots] = False
        table.has_begun[plan.slots[plan.starts_fresh]] = False
        # Sequences that have left run no more steps: their pages in this step stay empty.
        has_left = ~table.is_running[plan.slots]
        self.invalidate_from(plan.slots[has_left], plan.starts[has_left])
        self.rewind(plan)
        self._land(plan)

    def rewind(self, plan: StepPlan) -> None:
        """Resume the sequences of a lost step from the last position whose state exists."""
        is_running = self.table.is_running[plan.slots]
        slots, starts = plan.slots[is_running], plan.starts[is_running]
        resumes = self._states.undo(slots, starts)
        self.table.num_computed[slots] = np.maximum(resumes, 0)
        for slot in slots[resumes < 0].tolist():
            sequence = self.table.sequence(slot)
            sequence.num_failures += 1
            sequence.is_suspect |= sequence.num_failures >= MAX_FAILURES_IN_COMPANY
            self.preempt(slot)

    def plan_rebuild(self, plan: StepPlan) -> StepPlan | None:
        """Return the step that recomputes lost state of a lost step's sequences.

        It covers as much as its budget allows; None if each sequence is at the lost step's start.
        """
        table, left = self.table, self.step_limit.tokens
        stops: dict[int, int] = {}
        for slot, stop in zip(plan.slots.tolist(), plan.starts.tolist(), strict=True):
            start = int(table.num_computed[slot])
            if table.is_running[slot] and start < stop and left > 0:
                reached = self._states.attend(slot, start, min(stop, start + left))
                stops |= {slot: reached} if reached > start else {}
                left -= reached - start
        return self._laid_out(np.empty(0, np.int64), stops) if stops else None

    def keep_logprobs(self, sequence: Sequence, start: int) -> None:
        """Cache the scores of a prompt from a token on, for sequences with the same prefix."""
        self._states.keep_logprobs(sequence, start)

    def note_end(self, sequence: Sequence) -> None:
        """Record a sequence that has ended normally."""
        self._placer.note_end(sequence)
        if self.drafts is not None:
            self.drafts.note_end(sequence)

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Record the duration of a step, directly after its collection."""
        self.step_limit.note_fit()
        if self.drafts is not None:
            self.drafts.note_seconds(plan, seconds)
        table, slots = self.table, plan.slots
        is_urgent = table.is_urgent[slots]
        self.line_limit.note(
            seconds,
            num_line_tokens=int((plan.stops - plan.starts)[~is_urgent].sum()),
            is_first=bool((is_urgent & (plan.starts < table.num_prompt_tokens[slots])).any()),
        )

    def drop(self, unwanted: AbstractSet[object]) -> None:
        """Remove sequences permanently, at any stage."""
        for slot in self.table.running.tolist():
            if self.table.sequence(slot) in unwanted:
                self.finish(slot)
        self._suspects.remove(unwanted)
        self._admission.remove(unwanted)

    def finish(self, slot: int) -> Sequence:
        """Remove a sequence permanently; its full pages stay cached until they are reused.

        Pages that it did not fill are forgotten. Its slot and pages are free once no step in flight
        holds them.
        """
        self._states.register_generated(slot)
        self.invalidate_from([slot], self.table.num_computed[[slot]])
        return self._leave(slot)

    def discard(self, slot: int) -> Sequence:
        """Remove a sequence permanently whose pages may be invalid, and forget these pages."""
        self.invalidate_from([slot], [0])
        return self._leave(slot)

    def invalidate_from(self, slots: Iterable[int], starts: Iterable[int]) -> None:
        """Forget pages of sequences from a token on, and all pages computed from them.

        Pages that others hold as well are forgotten too: the others may have read invalid state.
        """
        for slot, start in zip(slots, starts, strict=True):
            sequence = self.table.sequences[slot]
            self._states.invalidate_from(slot, start, sequence.digests if sequence else [])

    def plan_alone(self, sequence: Sequence) -> StepPlan:
        """Place a sequence of one token, and return a step that contains only this token.

        A slot must be free, and no step in flight. `discard` removes the sequence.
        """
        while not (placement := self._states.place(sequence)).fits:
            self.preempt(int(self.table.running[-1]))
        slot = self.table.place(sequence, 0)
        self._states.enter(slot, placement, None)
        return self._laid_out(np.empty(0, np.int64), {slot: 1})

    def preempt(self, slot: int) -> None:
        """Release a sequence's slot and pages; it waits to be recomputed."""
        sequence = self.finish(slot)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        queue = self._suspects if sequence.is_suspect else self._admission
        queue.requeue(sequence)

    def _leave(self, slot: int) -> Sequence:
        """Remove a sequence; its slot and pages are free once no step in flight holds them."""
        sequence = self.table.remove(slot)
        if not self.table.num_in_flight[slot]:
            self._free(slot)
        return sequence

    def _free(self, slot: int) -> None:
        self._states.release(slot)
        self.table.free(slot)

    def _land(self, plan: StepPlan) -> None:
        """Release a step in flight's hold on sequences that have left."""
        table = self.table
        self._num_in_flight -= 1
        table.num_in_flight[plan.slots] -= 1
        has_left = ~table.is_running[plan.slots] & (table.num_in_flight[plan.slots] == 0)
        for slot in plan.slots[has_left].tolist():
            self._free(slot)

    def _decodes(self) -> NDArray[np.int64]:
        """Return the slots with one token to compute, in the order of their starts."""
        table = self.table
        running = table.running
        pending = table.num_tokens[running] - table.num_computed[running]
        is_decode = (pending == 1) & ~table.is_fully_launched[running]
        decodes: NDArray[np.int64] = running[is_decode & ~table.is_verifying[running]]
        return decodes

    def _must_wait(self, decodes: NDArray[np.int64]) -> bool:
        """Return whether the next step needs results of the steps in flight.

        It may need ids for penalties; or pages, so that no sequence is preempted just before
        another ends.
        """
        table = self.table
        if not self._keeps_ids:
            is_unknown = table.num_known_ids[decodes] < table.num_tokens[decodes]
            if (table.reads_ids[decodes] & is_unknown).any():
                return True
        return self._is_blocked() or not self._states.can_extend(decodes)

    def _extended(self, decodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give each decode a place for its token; return those that were not preempted for it."""
        while not self._states.can_extend(decodes):
            self.preempt(int(self.table.running[-1]))
            decodes = decodes[self.table.is_running[decodes]]
        self._states.extend(decodes)
        return decodes

    def _is_blocked(self) -> bool:
        """Return whether the first-started sequence has no place for its prompt's next token."""
        table = self.table
        if self._states.keeps_places or not len(table.running):
            return False
        slot = int(table.running[0])
        start = int(table.num_computed[slot])
        is_prompt = table.num_tokens[slot] - start > 1
        return bool(is_prompt) and self._states.attend(slot, start, start + 1) == start

    def _admit(self, budget: StepBudget) -> dict[int, int]:
        """Start waiting sequences; return the stops of their spans by slot."""
        stops: dict[int, int] = {}
        while self.table.free_slots:
            queue = self._suspects if len(self._suspects) else self._admission
            sequence = queue.peek()
            if sequence is None or budget.left(is_urgent=sequence.is_urgent) <= 0:
                break
            if not self._placer.may_join(sequence) or not has_rows_for(sequence, budget):
                break
            if self._placer.must_wait(sequence):
                break
            slot = self._placer.try_place(queue)
            if slot is None:
                break
            stops |= self._prompts.take(slot, budget)
        return stops

    def _admit_urgent(self) -> None:
        """Start interactive sequences first; preempt rows of files for them, newest first.

        Without rows, a request with several sequences gives one up for a request with none. A
        preempted sequence is recomputed later, except for the pages that it has filled.
        """
        while (sequence := self._admission.peek()) is not None and sequence.is_urgent:
            if len(self._suspects) or not self._placer.may_join(sequence):
                return
            if self._placer.must_wait(sequence):  # `_admit` may start it once the page is named
                return
            while not self.table.free_slots or self._placer.try_place(self._admission) is None:
                if not self._make_way_for(sequence):
                    return

    def _make_way_for(self, sequence: Sequence) -> bool:
        """Preempt another sequence; False if there is none, or a step still holds its pages."""
        slot = preemptible_slot(self.table, sequence.request)
        if slot is None:
            return False
        is_held = bool(self.table.num_in_flight[slot])
        self.preempt(slot)
        return not is_held

    def _is_awaited(self) -> bool:
        """Return whether an interactive sequence waits for its first token."""
        table = self.table
        has_none = table.num_tokens == table.num_prompt_tokens
        return bool((table.is_running & table.is_urgent & has_none).any())

    def _limit_lines(self, most: int, decodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drop rows of files above a limit, the last-started first.

        The limit includes the first-started row if it is still at its prompt.
        """
        table = self.table
        lines = table.running[~table.is_urgent[table.running]]
        if most and len(lines) and table.num_tokens[lines[0]] - table.num_computed[lines[0]] > 1:
            most -= 1
        return decodes[: int(table.is_urgent[decodes].sum()) + most]

    def _laid_out(self, decodes: NDArray[np.int64], stops_of: dict[int, int]) -> StepPlan:
        """Return a step from `decodes`, which come first, and slots with their spans' stops.

        In both parts, spans with the same adapter are neighbors, as their rows are multiplied
        together.
        """
        table = self.table
        slots = np.concatenate([decodes, np.array(list(stops_of), np.int64)])
        starts = table.num_computed[slots]
        stops = np.concatenate([starts[: len(decodes)] + 1, list(stops_of.values())])
        is_decode = (table.num_tokens[slots] - starts == 1) & (stops - starts == 1)
        order = np.lexsort((table.adapter[slots], ~is_decode))
        slots, starts, stops = slots[order], starts[order], stops.astype(np.int64)[order]
        num_drafts = np.maximum(stops - table.num_tokens[slots], 0)
        samples = stops >= table.num_tokens[slots]
        scored_from = np.maximum(starts, table.first_scored_row[slots])
        is_scored = (table.prompt_logprobs[slots] >= 0) & (scored_from < stops)
        is_scored &= scored_from + 1 < table.num_prompt_tokens[slots]
        return StepPlan(
            num_decodes=int(is_decode.sum()),
            slots=slots,
            starts=starts,
            stops=stops,
            num_logits=np.where(is_scored, stops - scored_from, samples + num_drafts),
            samples=samples,
            is_scored=is_scored,
            starts_fresh=~table.has_begun[slots],
            num_drafts=num_drafts,
        )
