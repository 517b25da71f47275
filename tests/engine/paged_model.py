"""A model without tensors, which checks the cached contents, and has a deterministic output.

`PageMemory` replaces the KV cache. Each slot of a page contains the whole prefix that was computed
into it, with its salt and adapter, so that reading a page that another sequence wrote, or that was
never written, fails at once. `PagedModel` is a runner over it whose logits are a function of the
preceding tokens. It behaves like a device that the host waits for: the table contains garbage for
a sampled token until its step is collected, and a failure may show only then.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.engine.errors import DeviceFailed
from tidemill.engine.loop.runner import Readout
from tidemill.engine.loop.step_logits import StepLogits
from tidemill.engine.scheduling.sequence import Sequence
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.groups import NO_PAGE, Pages, StateGroup, Visibility
from tidemill.engine.state.pages import PagePool
from tidemill.engine.state.rows import Rows

Tokens = tuple[int, ...]
LogitsOf = Callable[[Tokens], "list[float] | NDArray[np.float32]"]
UNKNOWN = -7


def further_groups(
    table: SequenceTable,
    pool: PagePool,
    *,
    window: int = 0,
    chunk: int = 0,
    num_rows: int = 0,
    step_tokens: int = 32,
) -> list[StateGroup]:
    """Return groups of a window, of chunks and of rows, each if it is requested."""
    groups: list[StateGroup] = []

    def pages(visibility: Visibility) -> None:
        arrays = (
            np.zeros_like(table.pages),
            np.zeros_like(table.num_pages),
            np.zeros_like(table.sources),
        )
        parts = (pool, table.page_size, *arrays)
        tag = bytes([len(groups) + 1])
        groups.append(Pages(*parts, visibility=visibility, step_tokens=step_tokens, tag=tag))

    if window:
        pages(Visibility(lambda places: np.maximum(places - window + 1, 0), window))
    if chunk:
        pages(Visibility(lambda places: places // chunk * chunk, chunk))
    if num_rows:
        groups.append(Rows(PagePool(num_rows), table.page_size, len(table.sequences)))
    return groups


class PageMemory:
    """The tokens that a step would write to the cache and read from it.

    `groups` is the state in addition to the table's pages: tokens read the pages that they see, and
    a span continues from a row that contains exactly the tokens before it.
    """

    def __init__(self, table: SequenceTable, groups: Several[StateGroup] = ()) -> None:
        self._table = table
        self._pages = [group for group in groups if isinstance(group, Pages)]
        self._rows = [group for group in groups if isinstance(group, Rows)]
        self._of_pages: dict[tuple[int, int, int], tuple[str, Tokens]] = {}
        self._of_rows: dict[int, tuple[str, Tokens]] = {}
        self._slots: dict[tuple[int, int], tuple[str, Tokens]] = {}
        self._sampled: dict[tuple[int, int], int] = {}  # ids by slot and place
        self._num_drafts: dict[int, int] = {}  # by slot, of the last step
        self._stops: dict[int, int] = {}

    def tokens_of(self, slot: int, stop: int) -> Tokens:
        """Return the first tokens of a running sequence; the last may be known only here."""
        num_known = int(self._table.num_known_ids[slot]) + self._num_drafts.get(slot, 0)
        tokens = self._table.tokens[slot, : min(stop, num_known)].tolist()
        return (*tokens, *(self._sampled[slot, place] for place in range(num_known, stop)))

    def compute(self, plan: StepPlan) -> None:
        """Write the tokens of a plan, as each layer does before it attends, then read them all."""
        size = self._table.page_size
        self._num_drafts = dict(zip(plan.slots.tolist(), plan.num_drafts.tolist(), strict=True))
        self._stops = dict(zip(plan.slots.tolist(), plan.stops.tolist(), strict=True))
        for slot, start, stop in spans_of(plan):
            tokens = self.tokens_of(slot, stop)
            salt = self._salt(slot)
            for position in range(start, stop):
                page = int(self._table.pages[slot, position // size])
                self._slots[page, position % size] = salt, tokens[: position + 1]
        copies = {}
        for slot, start in _copied(plan, self._table):
            source, page = self._table.sources[slot], self._table.pages[slot, start // size]
            for place in range(start % size):
                copies[int(page), place] = self._slots[int(source), place]
        self._slots |= copies
        for slot, _, stop in spans_of(plan):
            tokens = self.tokens_of(slot, stop)
            salt = self._salt(slot)
            for position in range(stop):
                assert position // size < self._table.num_pages[slot]
                page = int(self._table.pages[slot, position // size])
                assert self._slots[page, position % size] == (salt, tokens[: position + 1])
        for number, pages in enumerate(self._pages):
            self._compute_pages(number, pages, plan)
        for rows in self._rows:
            self._compute_rows(rows, plan)

    def _compute_pages(self, number: int, group: Pages, plan: StepPlan) -> None:
        """Write a plan's tokens to a further group of pages, then read what they see."""
        size = self._table.page_size
        for slot, start, stop in spans_of(plan):
            tokens, salt = self.tokens_of(slot, stop), self._salt(slot)
            for position in range(start, stop):
                page = int(group.pages[slot, position // size])
                self._of_pages[number, page, position % size] = salt, tokens[: position + 1]
        copies = {}
        for slot, start in _copied(plan, self._table):
            source, page = group.sources[slot], group.pages[slot, start // size]
            for place in range(start % size):
                copies[number, int(page), place] = self._of_pages[number, int(source), place]
        self._of_pages |= copies
        for slot, start, stop in spans_of(plan):
            tokens, salt = self.tokens_of(slot, stop), self._salt(slot)
            assert group.visibility is not None
            first = int(group.visibility.first(np.array([start], np.int64))[0])
            for position in range(first, stop):
                page = position // size
                assert group.first_live[slot] <= page < group.num_pages[slot]
                place = number, int(group.pages[slot, page]), position % size
                assert self._of_pages[place] == (salt, tokens[: position + 1])

    def _compute_rows(self, group: Rows, plan: StepPlan) -> None:
        """Read the rows that a plan's spans start from, then write the rows that they end in."""
        sources = group.sources_of(plan.slots, plan.starts).tolist()
        rows = group.rows[plan.slots].tolist()
        assert len(set(rows)) == len(rows)
        for row, source, (slot, start, stop) in zip(rows, sources, spans_of(plan), strict=True):
            assert source == row or source not in rows
            if source < 0:
                assert start == 0
            else:
                tokens = self.tokens_of(slot, stop)
                assert self._of_rows[source] == (self._salt(slot), tokens[:start])
        for row, (slot, _, stop) in zip(rows, spans_of(plan), strict=True):
            self._of_rows[row] = self._salt(slot), self.tokens_of(slot, stop)

    def _salt(self, slot: int) -> str:
        request = self._table.sequence(slot).request
        return f"{request.adapter} {request.cache_salt}"

    def scramble(self, plan: StepPlan) -> None:
        """Write garbage to the slots of a plan's tokens: the step failed half way."""
        self._stops = dict(zip(plan.slots.tolist(), plan.stops.tolist(), strict=True))
        size = self._table.page_size
        for slot, start, stop in spans_of(plan):
            for position in range(start, stop):
                page = int(self._table.pages[slot, position // size])
                self._slots[page, position % size] = "", ()
                for number, group in enumerate(self._pages):
                    page = int(group.pages[slot, position // size])
                    self._of_pages[number, page, position % size] = "", ()
            for rows in self._rows:
                self._of_rows[int(rows.rows[slot])] = "", ()

    def store_sampled(self, slots: Several[int], token_ids: Several[int]) -> None:
        """Store sampled ids; for now the host finds garbage at their places in the table."""
        for slot, token_id in zip(slots, token_ids, strict=True):
            if self._num_drafts.get(slot):
                continue  # its next token is known once the host has verified it
            place = self._stops[slot]
            self._sampled[slot, place] = token_id
            if place < self._table.max_model_len:
                self._table.tokens[slot, place] = UNKNOWN


class PagedModel:
    """A runner: `logits_of` returns the logits after some tokens.

    `fails` is called before each step with its sequences; its result is raised, or, with `is_late`,
    raised when the step is collected.
    """

    def __init__(
        self, table: SequenceTable, logits_of: LogitsOf, groups: Several[StateGroup] = ()
    ) -> None:
        self.fails: Callable[[list[Sequence]], Exception | None] | None = None
        self.is_late = False
        self.plans: list[StepPlan] = []
        self.violations: list[AssertionError] = []
        self.num_memory_freed = 0
        self.num_probes = 0
        self.is_gone = False  # fails every call, including a probe
        self.num_layers = 0
        self.capture_seconds = 0.0
        self.paged_ids = None
        self._table = table
        self._logits_of = logits_of
        self._width = len(logits_of((0,)))
        self._memory = PageMemory(table, groups)
        self._failure: Exception | None = None  # of a step in flight: later steps are garbage too

    def check(self) -> None:
        """Raise nothing: the device is never lost."""

    def probe(self) -> None:
        """Raise the device's permanent failure, if any."""
        self.num_probes += 1
        if self.is_gone:
            raise DeviceFailed("the device has failed")

    def free_memory(self) -> None:
        """Count the calls."""
        self.num_memory_freed += 1

    def run(self, plan: StepPlan) -> StepLogits:
        """Compute a plan like `Runner.run`."""
        self.plans.append(plan)
        running = [self._table.sequence(slot) for slot in plan.slots.tolist()]
        failure = self.fails(running) if self.fails else None
        if failure is not None and not self.is_late:
            self._memory.scramble(plan)
            raise failure
        self._failure = self._failure or failure
        if self._failure is not None:
            self._memory.scramble(plan)
            return StepLogits(torch.zeros(int(plan.num_logits.sum()), self._width))
        try:
            self._memory.compute(plan)
        except AssertionError as broken:
            self.violations.append(broken)  # since a step that raises would only run again
            raise
        rows = []
        for (slot, _, stop), count in zip(spans_of(plan), plan.num_logits.tolist(), strict=True):
            tokens = self._memory.tokens_of(slot, stop)
            rows += [self._logits_of(tokens[: end + 1]) for end in range(stop - count, stop)]
        return StepLogits(torch.tensor(np.array(rows, np.float32).reshape(-1, self._width)))

    def store_sampled(self, slots: NDArray[np.int64], token_ids: Tensor) -> None:
        """Store sampled ids like `Runner.store_sampled`."""
        self._memory.store_sampled(slots.tolist(), token_ids.tolist())

    def read_out(self, tensors: Several[Tensor]) -> Readout:
        """Return a step's results, or its failure."""
        return Readout(tensors) if self._failure is None else LateFailure(self)

    def take_failure(self) -> Exception:
        """Return the failure of the oldest step in flight; later steps are lost with it."""
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure


class LateFailure(Readout):
    """The readout of a step that failed on the device, which the host does not know yet."""

    def __init__(self, model: PagedModel) -> None:
        super().__init__([])
        self._model = model

    def wait(self) -> list[NDArray[np.int64]]:
        """Raise the failure."""
        raise self._model.take_failure()


def spans_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return slot, start and stop of each span in a plan."""
    columns = (plan.slots.tolist(), plan.starts.tolist(), plan.stops.tolist())
    return list(zip(*columns, strict=True))


def _copied(plan: StepPlan, table: SequenceTable) -> list[tuple[int, int]]:
    """Return slot and start of each span that copies the beginning of its page."""
    copied = plan.starts_fresh & (table.sources[plan.slots] != NO_PAGE)
    return list(zip(plan.slots[copied].tolist(), plan.starts[copied].tolist(), strict=True))


def chunks_of(plan: StepPlan) -> list[tuple[int, int]]:
    """Return start and stop of each span that is not a decode."""
    return [(start, stop) for _, start, stop in spans_of(plan)[plan.num_decodes :]]


def mixed(tokens: Tokens, salt: int = 0) -> int:
    """Return a number that depends on every token."""
    return crc32(np.array([salt, *tokens], np.int64).tobytes())


def spread_logits(vocabulary: int) -> LogitsOf:
    """Return logits that look random and have clear margins, and are equal for equal tokens."""

    def logits_of(tokens: Tokens) -> NDArray[np.float32]:
        return np.random.default_rng(mixed(tokens)).permutation(vocabulary).astype(np.float32)

    return logits_of
