"""A model without tensors: it checks that the cache holds what is read, and knows what to say.

`PageMemory` stands in for the KV cache. Each slot of a page holds the whole beginning that was
computed into it and its salt, so that reading a page which another sequence wrote, or nobody, fails
at once.
`PagedModel` is a runner over it whose logits are a function of the tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.scheduling.scheduler import StepPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import SequenceTable

Tokens = tuple[int, ...]
LogitsOf = Callable[[Tokens], "list[float] | NDArray[np.float32]"]


class PageMemory:
    """What a step's tokens would write to the cache and read from it."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._slots: dict[tuple[int, int], tuple[str, Tokens]] = {}

    def compute(self, plan: StepPlan) -> None:
        """Write the tokens of a plan, as each layer does before it attends, then read them all."""
        size = self._table.page_size
        spans = spans_of(plan)
        for slot, start, stop in spans:
            tokens = tokens_of(self._table, slot)
            salt = self._table.sequence(slot).request.cache_salt
            for position in range(start, stop):
                page = int(self._table.pages[slot, position // size])
                self._slots[page, position % size] = salt, tokens[: position + 1]
        for slot, _, stop in spans:
            tokens = tokens_of(self._table, slot)
            salt = self._table.sequence(slot).request.cache_salt
            for position in range(stop):
                assert position // size < self._table.num_pages[slot]
                page = int(self._table.pages[slot, position // size])
                assert self._slots[page, position % size] == (salt, tokens[: position + 1])

    def scramble(self, plan: StepPlan) -> None:
        """Write nonsense where a plan's tokens go: the step failed half way."""
        size = self._table.page_size
        for slot, start, stop in spans_of(plan):
            for position in range(start, stop):
                page = int(self._table.pages[slot, position // size])
                self._slots[page, position % size] = "", ()


class PagedModel:
    """A runner: `logits_of` gives the logits that follow some tokens.

    `fails` is asked before each step about its sequences; what it returns is raised.
    """

    def __init__(
        self,
        table: SequenceTable,
        logits_of: LogitsOf,
        fails: Callable[[list[Sequence]], Exception | None] | None = None,
    ) -> None:
        self.fails = fails
        self.plans: list[StepPlan] = []
        self.num_memory_freed = 0
        self.num_layers = 0
        self._table = table
        self._logits_of = logits_of
        self._memory = PageMemory(table)

    def free_memory(self) -> None:
        """Count the calls."""
        self.num_memory_freed += 1

    def run(self, plan: StepPlan) -> Tensor:
        """Compute a plan as `Runner.run` does."""
        self.plans.append(plan)
        running = [self._table.sequence(slot) for slot in plan.slots.tolist()]
        failure = self.fails(running) if self.fails else None
        if failure is not None:
            self._memory.scramble(plan)
            raise failure
        self._memory.compute(plan)
        width = len(self._logits_of((0,)))
        rows = []
        for (slot, _, stop), count in zip(spans_of(plan), plan.num_logits.tolist(), strict=True):
            tokens = tokens_of(self._table, slot)
            rows += [self._logits_of(tokens[: end + 1]) for end in range(stop - count, stop)]
        return torch.tensor(np.array(rows, np.float32).reshape(-1, width))


def spans_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return slot, first position and the one after the last of each span in a plan."""
    columns = (plan.slots.tolist(), plan.starts.tolist(), plan.stops.tolist())
    return list(zip(*columns, strict=True))


def chunks_of(plan: StepPlan) -> list[tuple[int, int]]:
    """Return first position and the one after the last of each span that is no decode."""
    return [(start, stop) for _, start, stop in spans_of(plan)[plan.num_decodes :]]


def tokens_of(table: SequenceTable, slot: int) -> Tokens:
    """Return all tokens of a running sequence."""
    return tuple(table.tokens[slot, : table.num_tokens[slot]].tolist())


def mixed(tokens: Tokens, salt: int = 0) -> int:
    """Return a number that every token has a say in."""
    return crc32(np.array([salt, *tokens], np.int64).tobytes())


def spread_logits(vocabulary: int) -> LogitsOf:
    """Return logits that look random and have clear margins, the same for the same tokens."""

    def logits_of(tokens: Tokens) -> NDArray[np.float32]:
        return np.random.default_rng(mixed(tokens)).permutation(vocabulary).astype(np.float32)

    return logits_of
