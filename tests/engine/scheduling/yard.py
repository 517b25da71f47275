"""A yard for schedulers: a table, a pool, and a memory that checks every step."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from tests.engine.paged_model import PageMemory, Tokens, further_groups, mixed, spans_of
from tidemill.engine.scheduling.admission import Admission, ArrivalOrder
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import Sequence, SequenceRequest
from tidemill.engine.scheduling.step_budget import LineTokenLimit
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.groups import NO_PAGE, Pages
from tidemill.engine.state.pages import PagePool
from tidemill.engine.state.rows import Rows

PAGE = 4
VOCABULARY = 3
END = 2


def next_token(tokens: Tokens) -> int:
    """Return the next token of the imaginary model."""
    return mixed(tokens) % VOCABULARY


def expected_tokens(
    request: SequenceRequest, max_model_len: int = 64, end: int | None = None
) -> list[int]:
    """Return what a request generates when nothing else runs and nothing is cached."""
    tokens = list(request.prompt_ids)
    generated: list[int] = []
    while len(generated) < request.max_tokens and len(tokens) < max_model_len:
        generated.append(next_token(tuple(tokens)))
        tokens.append(generated[-1])
        if generated[-1] == end:
            break
    return generated


@dataclass
class Yard:
    """A scheduler with its table and pool, a memory that checks each step, and the results."""

    num_pages: int = 64
    max_num_seqs: int = 4
    max_model_len: int = 64
    budget: int = 32
    end: int | None = None  # the token that ends a sequence
    admission: Admission = field(default_factory=ArrivalOrder)
    steps_ahead: int = 0
    line_limit: LineTokenLimit | None = None
    keeps_ids: bool = False
    kinds: dict[str, int] = field(default_factory=dict)  # for `further_groups`
    fewest_copied: int = 0
    in_flight: list[tuple[StepPlan, list[int]]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        """Put the parts together."""
        self.table = SequenceTable(self.max_num_seqs, self.max_model_len, PAGE)
        self.pool = PagePool(self.num_pages)
        self.groups = further_groups(self.table, self.pool, step_tokens=self.budget, **self.kinds)
        self.scheduler = Scheduler(
            self.table,
            self.pool,
            self.admission,
            self.budget,
            self.line_limit,
            keeps_ids=self.keeps_ids,
            groups=self.groups,
            fewest_copied=self.fewest_copied,
        )
        self.memory = PageMemory(self.table, self.groups)
        self.num_added = 0
        self._computed: dict[Sequence, tuple[int, int]] = {}  # preemptions, tokens computed

    def add(self, prompt: list[int], max_tokens: int = 1, **other: Any) -> Sequence:
        """Queue a sequence."""
        return self.add_request(SequenceRequest(prompt, max_tokens, **other))

    def add_request(self, request: SequenceRequest) -> Sequence:
        """Queue a sequence for a request."""
        sequence = Sequence(request, self.num_added)
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    @property
    def is_busy(self) -> bool:
        """Something runs, waits, or is in flight."""
        return (
            bool(self.in_flight)
            or self.scheduler.num_waiting > 0
            or bool(self.table.is_running.any())
        )

    def slot_of(self, sequence: Sequence) -> int:
        """Return where a running sequence is."""
        return self.table.sequences.index(sequence)

    def plan(self) -> StepPlan:
        """Plan a step that must exist, and check what holds for every plan."""
        plan = self.scheduler.plan()
        assert plan is not None
        self._check_work(plan)
        self._check_pages()
        return plan

    def run(self, plan: StepPlan) -> None:
        """Launch a plan, and collect the oldest when enough are in flight."""
        self.memory.compute(plan)
        spans = [span for span in spans_of(plan) if span[0] in plan.sampled]
        tokens = [next_token(self.memory.tokens_of(slot, stop)) for slot, _, stop in spans]
        self.memory.store_sampled(plan.sampled.tolist(), tokens)
        self.scheduler.launch(plan)
        self.in_flight.append((plan, tokens))
        self.num_steps += 1
        if len(self.in_flight) > self.steps_ahead:
            self.collect()

    def collect(self) -> None:
        """Collect the oldest step in flight, and end the sequences that are complete."""
        plan, tokens = self.in_flight.pop(0)
        valid = np.ones(len(tokens), np.bool_)
        accepted = self.scheduler.collect(plan, np.array(tokens, np.int64), valid)
        slots = plan.sampled
        is_full = self.table.num_known_ids[slots] >= self.table.max_tokens[slots]
        has_ended = accepted & (np.array(tokens) == self.end)
        for slot in slots[self.table.is_running[slots] & (is_full | has_ended)].tolist():
            self.finished.append(self.scheduler.finish(slot))
        self._check_pages()

    def step(self) -> StepPlan | None:
        """Plan a step and run it, or collect one where the next has to wait for it."""
        if not self.in_flight:
            plan = self.plan()
        else:
            plan = self.scheduler.plan()
            if plan is None:
                self.collect()
                return None
            self._check_work(plan)
        self.run(plan)
        return plan

    def run_all(self, max_steps: int = 2000) -> None:
        """Run until nothing is left."""
        while self.is_busy:
            self.step()
            assert self.num_steps <= max_steps
        assert self.scheduler.plan() is None

    def _check_work(self, plan: StepPlan) -> None:
        """Each sequence resumes where it stopped; the first started is always included."""
        table = self.table
        spans = spans_of(plan)
        assert spans
        assert sum(stop - start for _, start, stop in spans) <= self.budget
        assert len({slot for slot, _, _ in spans}) == len(spans)
        lengths = (plan.stops - plan.starts).tolist()
        assert lengths[: plan.num_decodes] == [1] * plan.num_decodes
        assert all(plan.samples[: plan.num_decodes])
        for slot, start, stop in spans:
            sequence = table.sequence(slot)
            cached = int(table.num_computed[slot])
            epoch, known = self._computed.get(sequence, (-1, 0))
            if epoch != sequence.num_preemptions:
                assert (cached % PAGE > 0) == (table.sources[slot] != NO_PAGE)
                known = cached
            assert start == known == cached
            assert start < stop <= table.num_tokens[slot]
            self._computed[sequence] = (sequence.num_preemptions, stop)
            samples = slot in plan.sampled.tolist()
            assert samples == (stop == table.num_tokens[slot])
        going_on = table.running[~table.is_fully_launched[table.running]]
        assert going_on[0] in plan.slots

    def _check_pages(self) -> None:
        """The pool counts each sequence's pages; those named are named after their tokens."""
        holders = [0] * self.num_pages
        for slot in set(range(self.max_num_seqs)) - set(self.table.free_slots):
            held = self.table.pages[slot, : self.table.num_pages[slot]].tolist()
            sources = [self.table.sources[slot]]
            for group in self.groups:
                if isinstance(group, Pages):
                    live = slice(group.first_live[slot], group.num_pages[slot])
                    held += group.pages[slot, live].tolist()
                    sources.append(group.sources[slot])
            for page in (*held, *(int(page) for page in sources if page != NO_PAGE)):
                holders[page] += 1
        assert self.pool._holders == holders
        for group in self.groups:
            if isinstance(group, Rows):
                held = [row for row in (*group.rows, *group.sources) if row >= 0]
                assert (
                    group.pool._holders
                    == np.bincount(held, minlength=group.pool.num_pages).tolist()
                )
        assert self.pool.num_free == holders.count(0)

    def check_empty(self) -> None:
        """No page is held and no slot taken when all is done."""
        assert self.pool.num_free == self.num_pages
        assert not self.table.num_in_flight.any()
        assert self.pool._holders == [0] * self.num_pages
        assert all(group.pool.num_free == group.pool.num_pages for group in self.groups)
        assert sorted(self.table.free_slots) == list(range(self.max_num_seqs))


def long(length: int, seed: int = 0) -> list[int]:
    """Return a prompt that differs for each seed."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


class LongestFirst:
    """A custom admission policy: the request with the most possible tokens starts first."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        """Return how many sequences wait here."""
        return len(self._queue)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by the tokens it may need; among equals the last one is first."""
        self._queue.append(sequence)
        self._queue.sort(key=lambda one: (one.request.max_tokens, one.arrival))

    requeue = add

    def peek(self) -> Sequence | None:
        """Return the sequence with the most possible tokens."""
        return self._queue[-1] if self._queue else None

    def pop(self) -> Sequence:
        """Remove and return the sequence with the most possible tokens."""
        return self._queue.pop()

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Forget those of `unwanted` that wait here."""
        self._queue = [one for one in self._queue if one not in unwanted]


def waiting(scheduler: Scheduler) -> list[Sequence]:
    """Return the sequences that wait in a scheduler whose policy is `ArrivalOrder`."""
    queues = (scheduler._suspects, cast("ArrivalOrder", scheduler._admission))
    return [sequence for queue in queues for _, sequence in sorted(queue._heap)]
