"""Which tokens the next step computes: continuous batching under a token budget and a page pool.

Every running sequence with one token to compute gets it; what the budget has left goes to prompts,
in chunks, oldest first; then waiting sequences are admitted while slots and pages last, in the
order of a policy. When a sequence needs a page and there is none, the one that started last gives
all of its pages back and waits to be recomputed, so the one that started first always advances. No
tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.admission import Admission, ArrivalOrder
from engine.scheduling.pages import PagePool, page_digest, root_digest
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import SequenceTable

# Scoring a prompt takes the logits of all its tokens: [rows, vocabulary] of a step must stay small.
MAX_SCORED_ROWS = 256
# How soon, and by how much, steps grow again after one that did not fit into memory.
GROW_AFTER_STEPS = 64
GROWTH = 1 / 8


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of `S` spans: tokens `starts[s] : stops[s]` of the sequence in `slots[s]`, for each.

    The first `num_decodes` spans are of one token, their sequence's last. The logits of a span's
    last `num_logits[s]` tokens are wanted. Where it `samples`, the last of these gives the sequence
    its next token. Where it `starts_anew`, the sequence was taken for this step: the pages that it
    shares, the step may yet compute.
    """

    num_decodes: int
    slots: NDArray[np.int64]  # [S]
    starts: NDArray[np.int64]  # [S]
    stops: NDArray[np.int64]  # [S]
    num_logits: NDArray[np.int64]  # [S]
    samples: NDArray[np.bool_]  # [S]
    starts_anew: NDArray[np.bool_]  # [S]

    @property
    def sampled(self) -> NDArray[np.int64]:
        """Slots that get a new token from this step, in the order of its logits."""
        return self.slots[self.samples]

    @property
    def sampled_rows(self) -> NDArray[np.int64]:
        """Rows of the step's logits that the tokens of `sampled` are chosen from."""
        return (np.cumsum(self.num_logits) - 1)[self.samples]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int((self.stops - self.starts).sum())


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


class Scheduler:
    """Plans steps over one table and one pool; `add` from anywhere between steps.

    `admission` says who starts next, but suspects of a failed step come before all others.
    """

    def __init__(
        self,
        table: SequenceTable,
        pool: PagePool,
        admission: Admission,
        max_num_batched_tokens: int,
    ) -> None:
        self.table = table
        self.pool = pool
        self.num_preemptions = 0
        self.bound = StepBound(max_num_batched_tokens)
        self._admission = admission
        self._suspects = ArrivalOrder()
        self._num_started = 0
        self._page_size = table.page_size
        self._scored_rows_left = 0  # of the step that is being planned

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Say whether a sequence that grows to `num_tokens` fits the pool when it is alone."""
        return self._pages_for(num_tokens) <= self.pool.num_pages

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their start, or to be recomputed."""
        return len(self._suspects) + len(self._admission)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has just arrived."""
        self._admission.add(sequence)

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when nothing runs and nothing waits."""
        self._scored_rows_left = MAX_SCORED_ROWS
        decodes = self._plan_decodes()
        budget = self.bound.tokens - len(decodes)
        stops = self._continue_prompts(budget)
        num_old = len(decodes) + len(stops)
        budget -= sum(stop - int(self.table.num_computed[slot]) for slot, stop in stops.items())
        stops |= self._admit(budget)
        return self._laid_out(decodes, stops, num_old) if len(decodes) or stops else None

    def _laid_out(
        self, decodes: NDArray[np.int64], stops_of: dict[int, int], num_old: int
    ) -> StepPlan:
        """Lay a step's spans out, decodes first: `decodes`, then slots with where they stop.

        All after the first `num_old` were taken for this step.
        """
        table = self.table
        slots = np.concatenate([decodes, np.array(list(stops_of), np.int64)])
        starts = table.num_computed[slots]
        is_decode = table.num_tokens[slots] - starts == 1
        stops = np.concatenate([starts[: len(decodes)] + 1, list(stops_of.values())])
        order = np.argsort(~is_decode, kind="stable")
        slots, starts, stops = slots[order], starts[order], stops.astype(np.int64)[order]
        samples = stops == table.num_tokens[slots]
        is_scored = table.prompt_logprobs[slots] >= 0
        is_scored &= starts + 1 < table.num_prompt_tokens[slots]
        return StepPlan(
            num_decodes=int(is_decode.sum()),
            slots=slots,
            starts=starts,
            stops=stops,
            num_logits=np.where(is_scored, stops - starts, samples),
            samples=samples,
            starts_anew=order >= num_old,
        )

    def advance(self, plan: StepPlan, token_ids: NDArray[np.int64]) -> int:
        """Record a run step: `token_ids` are the new tokens of `plan.sampled`, in order.

        Returns how many there was room for.
        """
        table = self.table
        table.num_computed[plan.slots] = plan.stops
        sampled = plan.sampled
        growing = table.num_tokens[sampled] < table.max_tokens[sampled]
        slots = sampled[growing]
        table.tokens[slots, table.num_tokens[slots]] = token_ids[growing]
        table.num_tokens[slots] += 1
        return len(slots)

    def drop(self, unwanted: AbstractSet[object]) -> None:
        """Take sequences out for good, wherever they are."""
        for slot in self.table.running.tolist():
            if self.table.sequence(slot) in unwanted:
                self.finish(slot)
        self._suspects.remove(unwanted)
        self._admission.remove(unwanted)

    def finish(self, slot: int) -> Sequence:
        """Take a sequence out of its slot for good; its full pages stay known until reused."""
        sequence, pages = self.table.remove(slot)
        self.pool.release(pages)
        return sequence

    def preempt(self, slot: int) -> None:
        """Take a sequence's slot and pages away; it waits to be recomputed."""
        sequence = self.finish(slot)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        queue = self._suspects if sequence.is_suspect else self._admission
        queue.give_back(sequence)

    def _plan_decodes(self) -> NDArray[np.int64]:
        table = self.table
        running = table.running
        pending = table.num_tokens[running] - table.num_computed[running]
        decodes: NDArray[np.int64] = running[pending == 1]
        full = table.num_tokens[decodes] > table.num_pages[decodes] * self._page_size
        needy = decodes[full].tolist()
        while not self.pool.can_allocate(len(needy)):
            youngest = int(table.running[-1])
            self.preempt(youngest)
            needy = [slot for slot in needy if slot != youngest]
        for slot, page in zip(needy, self.pool.allocate(len(needy)), strict=True):
            table.pages[slot, table.num_pages[slot]] = page
            table.num_pages[slot] += 1
        decodes = decodes[table.is_running[decodes]]
        for slot in decodes[table.num_tokens[decodes] % self._page_size == 0].tolist():
            self._register(slot, int(table.num_tokens[slot]))
        return decodes

    def _continue_prompts(self, budget: int) -> dict[int, int]:
        """Go on with prompts that are under way; return slots with where their spans stop."""
        table = self.table
        running = table.running
        pending = table.num_tokens[running] - table.num_computed[running]
        stops: dict[int, int] = {}
        for slot in running[pending > 1].tolist():
            if budget <= 0:
                break
            if not self._has_rows_for(table.sequence(slot)):
                continue
            stops[slot] = self._compute(slot, budget)
            budget -= stops[slot] - int(table.num_computed[slot])
        return stops

    def _admit(self, budget: int) -> dict[int, int]:
        """Start waiting sequences; return their slots with where their spans stop."""
        stops: dict[int, int] = {}
        while budget > 0 and self.table.free_slots:
            queue = self._suspects if len(self._suspects) else self._admission
            sequence = queue.first()
            if sequence is None or not self._may_join(sequence) or not self._has_rows_for(sequence):
                break
            slot = self._try_place(sequence)
            if slot is None:
                break
            queue.take()
            stops[slot] = self._compute(slot, budget)
            budget -= stops[slot] - int(self.table.num_computed[slot])
        return stops

    def _may_join(self, sequence: Sequence) -> bool:
        """A suspect of a failed step runs alone, so that a second failure tells who it was."""
        if self.table.num_running == 0:
            return True
        if self.table.num_running == 1:
            (slot,) = self.table.running.tolist()
            return not sequence.is_suspect and not self.table.sequence(slot).is_suspect
        return not sequence.is_suspect

    def _try_place(self, sequence: Sequence) -> int | None:
        shared = self._cached_pages(sequence)
        needed = self._pages_for(sequence.num_tokens) - len(shared)
        # As many pages as the running sequences fill in a step: else a newcomer is soon preempted.
        spare = self._pages_for(self.table.num_running)
        if not self.pool.can_allocate(needed + self.pool.num_unheld(shared) + spare):
            return None
        self.pool.share(shared)
        pages = shared + self.pool.allocate(needed)
        num_cached = len(shared) * self._page_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_cached
            sequence.seniority = self._num_started
            self._num_started += 1
        return self.table.place(sequence, pages, num_cached)

    def _cached_pages(self, sequence: Sequence) -> list[int]:
        """Look the sequence's beginning up; its last token is always computed anew."""
        request, size = sequence.request, self._page_size
        num_full = sequence.num_tokens // size
        if len(sequence.digests) < num_full:
            tokens = np.array([*request.prompt_ids, *sequence.generated], np.int32)
            self._extend_digests(sequence, tokens, num_full)
        if request.prompt_logprobs is not None:
            return []
        return self.pool.lookup(sequence.digests[: (sequence.num_tokens - 1) // size])

    def _has_rows_for(self, sequence: Sequence) -> bool:
        """Say whether the step may compute more of a prompt: all of it, or a few scored rows."""
        return sequence.request.prompt_logprobs is None or self._scored_rows_left > 0

    def _compute(self, slot: int, budget: int) -> int:
        """Take up to `budget` tokens of a sequence into the step; return where its span stops."""
        table = self.table
        start, total = int(table.num_computed[slot]), int(table.num_tokens[slot])
        is_scored = table.sequence(slot).request.prompt_logprobs is not None
        stop = min(total, start + (min(budget, self._scored_rows_left) if is_scored else budget))
        if is_scored:
            self._scored_rows_left -= stop - start
        self._register(slot, stop)
        return stop

    def _register(self, slot: int, num_tokens: int) -> None:
        """Name the pages that this step fills.

        Each layer stores before it attends, so a sequence admitted in this very step may read them.
        """
        table, size = self.table, self._page_size
        sequence = table.sequence(slot)
        self._extend_digests(sequence, table.tokens[slot], num_tokens // size)
        for index in range(int(table.num_computed[slot]) // size, num_tokens // size):
            self.pool.register(int(table.pages[slot, index]), sequence.digests[index])

    def _extend_digests(
        self, sequence: Sequence, tokens: NDArray[np.int32], num_pages: int
    ) -> None:
        """Name the first `num_pages` pages of a sequence, those that have no name yet."""
        digests, size = sequence.digests, self._page_size
        for index in range(len(digests), num_pages):
            parent = digests[-1] if digests else root_digest(sequence.request.cache_salt)
            digests.append(page_digest(parent, tokens[index * size : (index + 1) * size]))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
