"""Requests of one mix without end, before a scheduler, and steps that are not computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.gpu.counts import Spans
from bench.gpu.mixes import Mix
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable

NUM_WAITING = 64
GREEDY = Sampling(temperature=0)


class Supply:
    """Keeps requests waiting at all times; ids of prompts are below `vocabulary`.

    The first ones start in the middle: part of their outputs is in their prompts already, so that
    the steady mixture exists from the start.
    """

    def __init__(
        self,
        mix: Mix,
        scheduler: Scheduler,
        add: Callable[[SequenceRequest], object],
        num_first: int,
        vocabulary: int,
    ) -> None:
        self._mix, self._scheduler, self._add_request = mix, scheduler, add
        self._rng = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self._beginning = self._ids(mix.shared)
        self._num_first = num_first
        for _ in range(num_first):
            self._add(int(self._rng.integers(0, mix.output)))

    def top_up(self) -> None:
        """Keep more requests waiting than can start in a step."""
        while self._scheduler.num_waiting < NUM_WAITING:
            self._add(0)

    def fill(self) -> int:
        """Run until the initial requests have started; return the number of steps.

        Nothing is computed.
        """
        num_started = num_steps = 0
        while num_started < self._num_first:
            self.top_up()
            plan = self._scheduler.plan()
            assert plan is not None
            num_started += int(plan.starts_fresh.sum())
            num_steps += 1
            self._scheduler.launch(plan)
            land(self._scheduler, plan)
        return num_steps

    def spans(self, plan: StepPlan) -> Spans:
        """Return a step's spans, and its shared tokens."""
        return spans_of(self._scheduler.table, plan, is_shared=bool(self._mix.shared))

    def _add(self, done: int) -> None:
        prompt = [*self._beginning, *self._ids(self._mix.prompt + done)]
        self._add_request(SequenceRequest(prompt, self._mix.output - done, GREEDY))

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(1, self._vocabulary, count).tolist()
        return ids


def spans_of(table: SequenceTable, plan: StepPlan, *, is_shared: bool = True) -> Spans:
    """Return a step's spans, and how many tokens of pages it reads more than once."""
    shared = 0
    if is_shared:
        counts = -(-plan.stops // table.page_size)
        rows = table.pages[plan.slots]
        met = rows[np.arange(rows.shape[1]) < counts[:, None]]
        shared = (len(met) - len(np.unique(met))) * table.page_size
    return Spans(plan.starts, plan.stops, int(plan.num_logits.sum()), shared)


def land(scheduler: Scheduler, plan: StepPlan) -> None:
    """Finish the oldest step in flight; sequences at their maximum length end."""
    table, slots = scheduler.table, plan.sampled
    nothing = np.zeros(len(slots), np.int64)
    taken = scheduler.collect(plan, nothing, np.ones_like(nothing, np.bool_))
    ended = taken & (table.num_known_ids[slots] >= table.max_tokens[slots])
    for slot in slots[ended].tolist():
        scheduler.finish(slot)
