"""Scheduler: continuous batching with chunked prefill, under a token budget and a page pool.

Every running sequence with one token to compute gets it; what the budget has left goes to prompts,
in chunks, oldest first; then waiting sequences are admitted while slots and pages last, in the
order of a policy. No chunk cuts an image that must be computed as one, for which a step may grow
beyond its budget. When a sequence needs a page and there is none, the one that started last gives
all of its pages back and waits to be recomputed, so the one that started first always advances. No
tensor is touched here.

Sequences that somebody waits for come before lines of files in all of this. Lines give way to them,
and take of a step what courtesy leaves them.

A step that is launched moves the counts; what it came to is collected later, oldest step first. In
between the next may be planned, with tokens whose ids nobody knows yet.
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

# A failure may pass, or be the size of the batch; one that keeps coming has an owner.
MAX_FAILURES_IN_COMPANY = 3


class Scheduler:
    """Plans steps over one table and one pool; `add` from anywhere between steps.

    `admission` says who starts next, but suspects of a failed step come before all others. Where
    the device `keeps_ids`, no step waits for those that penalties are reckoned from. `groups` are
    of layers whose state is not the full pages of the table. With a `forecast` lines start where
    the KV cache holds all that run to their ends. A step scores at most `max_scored_rows` tokens
    of prompts. With a `drafter` it verifies drafts, which layers must be able to forget: the state
    of all `groups` is pages then.
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
        pages = Pages(pool, table.page_size, table.pages, table.num_pages)
        self._states = StateCache(table, [pages, *groups])
        self.drafts = None if drafter is None else Drafts(table, pool, self._states, drafter)
        self._prompts = PromptChunks(table, self._states)
        self._placer = Placer(table, pool, self._states, forecast, self.drafts)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Say whether a sequence that grows to `num_tokens` fits when it is alone."""
        return self._states.can_ever_fit(num_tokens)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their start, or to be recomputed."""
        return len(self._suspects) + len(self._admission)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has just arrived."""
        if sequence.is_urgent:
            self.line_limit.expect()
        self._admission.add(sequence)

    def plan(self) -> StepPlan | None:
        """Return the next step; None while it must wait for one in flight, or has nothing to do."""
        decodes = self._decodes()
        if self._num_in_flight and self._must_wait(decodes):
            return None
        while self._is_blocked() and len(self.table.running) > 1:
            self.preempt(int(self.table.running[-1]))
        self._admit_urgent()
        most_of_lines = self.line_limit.tokens(
            self.step_limit.tokens, is_awaited=self._is_awaited()
        )
        decodes = self._extended(self._of_lines_at_most(most_of_lines, self._decodes()))
        budget = StepBudget(self.step_limit.tokens, most_of_lines, self._max_scored_rows)
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
        """Move the counts of a step that was launched: each of its samples is one token more."""
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
        """Record what the oldest step in flight came to: an id for each of `plan.sampled`.

        Returns which ids were taken; the others are of sequences that have ended meanwhile, that
        have no room for a token, or that are not valid.
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
        goes_on = table.is_running[plan.slots]
        slots = plan.slots[goes_on]
        self._states.settle(slots, np.minimum(plan.stops[goes_on], table.num_computed[slots]))
        return taken

    def undo(self, plan: StepPlan) -> None:
        """Move the counts back of a step that was launched and is lost, newest first."""
        table = self.table
        table.num_tokens[plan.slots] = table.num_known_ids[plan.slots]
        table.is_fully_launched[plan.slots] = table.is_verifying[plan.slots] = False
        table.has_begun[plan.slots[plan.starts_anew]] = False
        # Who left meanwhile runs no step again: what this one was to fill stays empty.
        has_left = ~table.is_running[plan.slots]
        self.invalidate_from(plan.slots[has_left], plan.starts[has_left])
        self.rewind(plan)
        self._land(plan)

    def rewind(self, plan: StepPlan) -> None:
        """Let the sequences of a step that is lost go on from where their state is still there."""
        goes_on = self.table.is_running[plan.slots]
        slots, starts = plan.slots[goes_on], plan.starts[goes_on]
        resumes = self._states.undo(slots, starts)
        self.table.num_computed[slots] = np.maximum(resumes, 0)
        for slot in slots[resumes < 0].tolist():
            sequence = self.table.sequence(slot)
            sequence.num_failures += 1
            sequence.is_suspect |= sequence.num_failures >= MAX_FAILURES_IN_COMPANY
            self.preempt(slot)

    def plan_rebuild(self, plan: StepPlan) -> StepPlan | None:
        """Return the step that computes again what the sequences of a lost step have lost.

        It comes as far as its tokens allow; None where each is where the lost step begins.
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
        """Keep the scores of a prompt from a token on, for those that begin alike."""
        self._states.keep_logprobs(sequence, start)

    def note_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended by itself."""
        self._placer.note_end(sequence)
        if self.drafts is not None:
            self.drafts.note_end(sequence)

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """Learn from how long a step took, just after it was collected."""
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
        """Take sequences out for good, wherever they are."""
        for slot in self.table.running.tolist():
            if self.table.sequence(slot) in unwanted:
                self.finish(slot)
        self._suspects.remove(unwanted)
        self._admission.remove(unwanted)

    def finish(self, slot: int) -> Sequence:
        """Take a sequence out for good; its full pages are known from now until reused.

        Those that it was to fill and did not are forgotten. Its slot and pages are free once no
        step in flight holds them.
        """
        self._states.register_generated(slot)
        self.invalidate_from([slot], self.table.num_computed[[slot]])
        return self._leave(slot)

    def discard(self, slot: int) -> Sequence:
        """Take a sequence out for good whose pages may be broken: nobody finds them any more."""
        self.invalidate_from([slot], [0])
        return self._leave(slot)

    def invalidate_from(self, slots: Iterable[int], starts: Iterable[int]) -> None:
        """Forget pages of sequences from a token on, and all that was computed from these.

        Others may hold the same pages, which proves nothing: they have read them, too.
        """
        for slot, start in zip(slots, starts, strict=True):
            sequence = self.table.sequences[slot]
            self._states.invalidate_from(slot, start, sequence.digests if sequence else [])

    def plan_alone(self, sequence: Sequence) -> StepPlan:
        """Place a sequence of one token, and return a step of nothing else.

        A slot must be free, and no step in flight. `discard` takes it out again.
        """
        while not (placement := self._states.place(sequence)).fits:
            self.preempt(int(self.table.running[-1]))
        slot = self.table.place(sequence, 0)
        self._states.enter(slot, placement, None)
        return self._laid_out(np.empty(0, np.int64), {slot: 1})

    def preempt(self, slot: int) -> None:
        """Take a sequence's slot and pages away; it waits to be recomputed."""
        sequence = self.finish(slot)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        queue = self._suspects if sequence.is_suspect else self._admission
        queue.requeue(sequence)

    def _leave(self, slot: int) -> Sequence:
        """Take a sequence out; its slot and pages are free once no step in flight holds them."""
        sequence = self.table.remove(slot)
        if not self.table.num_in_flight[slot]:
            self._free(slot)
        return sequence

    def _free(self, slot: int) -> None:
        self._states.release(slot)
        self.table.free(slot)

    def _land(self, plan: StepPlan) -> None:
        """Let go of what a step in flight held of sequences that have left."""
        table = self.table
        self._num_in_flight -= 1
        table.num_in_flight[plan.slots] -= 1
        has_left = ~table.is_running[plan.slots] & (table.num_in_flight[plan.slots] == 0)
        for slot in plan.slots[has_left].tolist():
            self._free(slot)

    def _decodes(self) -> NDArray[np.int64]:
        """Return the slots with one token to compute, those that started first in front."""
        table = self.table
        running = table.running
        pending = table.num_tokens[running] - table.num_computed[running]
        is_decode = (pending == 1) & ~table.is_fully_launched[running]
        decodes: NDArray[np.int64] = running[is_decode & ~table.is_verifying[running]]
        return decodes

    def _must_wait(self, decodes: NDArray[np.int64]) -> bool:
        """Say whether the next step needs what those in flight bring.

        Ids that penalties are reckoned from; or pages, lest one gives way while another is at its
        end.
        """
        table = self.table
        if not self._keeps_ids:
            is_unknown = table.num_known_ids[decodes] < table.num_tokens[decodes]
            if (table.reads_ids[decodes] & is_unknown).any():
                return True
        return self._is_blocked() or not self._states.can_extend(decodes)

    def _extended(self, decodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give each a place for its token; return those that need not give way for it."""
        while not self._states.can_extend(decodes):
            self.preempt(int(self.table.running[-1]))
            decodes = decodes[self.table.is_running[decodes]]
        self._states.extend(decodes)
        return decodes

    def _is_blocked(self) -> bool:
        """Say whether the sequence that started first has no place for its prompt's next token."""
        table = self.table
        if self._states.keeps_places or not len(table.running):
            return False
        slot = int(table.running[0])
        start = int(table.num_computed[slot])
        is_prompt = table.num_tokens[slot] - start > 1
        return bool(is_prompt) and self._states.attend(slot, start, start + 1) == start

    def _admit(self, budget: StepBudget) -> dict[int, int]:
        """Start waiting sequences; return their slots with where their spans stop."""
        stops: dict[int, int] = {}
        while self.table.free_slots:
            queue = self._suspects if len(self._suspects) else self._admission
            sequence = queue.peek()
            if sequence is None or budget.left(is_urgent=sequence.is_urgent) <= 0:
                break
            if not self._placer.may_join(sequence) or not has_rows_for(sequence, budget):
                break
            slot = self._placer.try_place(queue)
            if slot is None:
                break
            stops |= self._prompts.take(slot, budget)
        return stops

    def _admit_urgent(self) -> None:
        """Start whoever is waited for, before all else; lines give way to them, the newest first.

        Where there is no line, a request with many sequences gives one up for a request with none.
        What gives way is computed again later, but for the pages that it has filled.
        """
        while (sequence := self._admission.peek()) is not None and sequence.is_urgent:
            if len(self._suspects) or not self._placer.may_join(sequence):
                return
            while not self.table.free_slots or self._placer.try_place(self._admission) is None:
                if not self._make_way_for(sequence):
                    return

    def _make_way_for(self, sequence: Sequence) -> bool:
        """Let another wait; False where there is none, or a step holds its pages still."""
        slot = preemptible_slot(self.table, sequence.request.request_id)
        if slot is None:
            return False
        is_held = bool(self.table.num_in_flight[slot])
        self.preempt(slot)
        return not is_held

    def _is_awaited(self) -> bool:
        """Say whether somebody waits for a first token that may be computed now."""
        table = self.table
        has_none = table.num_tokens == table.num_prompt_tokens
        return bool((table.is_running & table.is_urgent & has_none).any())

    def _of_lines_at_most(self, most: int, decodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leave out lines above a number, those that started last.

        The line that started first advances, too, where it is still at its prompt.
        """
        table = self.table
        lines = table.running[~table.is_urgent[table.running]]
        if most and len(lines) and table.num_tokens[lines[0]] - table.num_computed[lines[0]] > 1:
            most -= 1
        return decodes[: int(table.is_urgent[decodes].sum()) + most]

    def _laid_out(self, decodes: NDArray[np.int64], stops_of: dict[int, int]) -> StepPlan:
        """Lay a step's spans out, decodes first: `decodes`, then slots with where they stop.

        Of either those of one adapter are neighbours, as their rows are multiplied together.
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
            starts_anew=~table.has_begun[slots],
            num_drafts=num_drafts,
        )
