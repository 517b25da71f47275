"""Simulates a GPU: steps as the scheduler plans them, timed by counting bytes and operations.

    python -m bench.gpu.simulator [--card h200] [--model llama-3-8b] [--mixes 1024/128,220/200]
        [--max-num-seqs 1024] [--max-num-batched-tokens 8192] [--levers]

Each step that the engine's own scheduler plans takes, for each of its kernels, the time of its
bytes or of its operations, whichever is longer (`bench.gpu.counts`), at the share of the ceilings
that kernels should reach, plus a gap for each kernel's start. The host's work is added. With
`--levers` it repeats this without one feature at a time, to show the value of each overlap and
pass. The share is that of the serial roofline (`bench.gpu.roofline`). Nothing here was measured on
a card.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from bench.gpu.cards import CARDS, Card
from bench.gpu.counts import Form, Kernel, Kind, Spans, kernels_of
from bench.gpu.mixes import MIXES, Mix
from bench.gpu.roofline import ITEMSIZE, Weights, kv_bytes, serial, state_bytes
from bench.gpu.shapes import architecture
from bench.gpu.supply import Supply, land
from tidemill.engine.kernels.layer_groups import LayerGroup, group_layers
from tidemill.engine.loop.assembly import further_groups
from tidemill.engine.loop.cuda_graphs import buckets
from tidemill.engine.loop.launch_cost import LAYER_SECONDS
from tidemill.engine.model.config.architecture import Architecture
from tidemill.engine.model.config.device import LIMITS_OF_GPU, StepLimits
from tidemill.engine.model.network.kv_cache_size import (
    ROWS_A_SNAPSHOT,
    TYPICAL_TOKENS,
    rows_of,
)
from tidemill.engine.scheduling.admission import ArrivalOrder
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import Sequence as OneSequence
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.groups import most_pages
from tidemill.engine.state.pages import PagePool
from tidemill.engine.state.rows import Rows

PAGE_SIZE = 16
NUM_STEPS = 2048
MANY_IDS = 1 << 30
CALLS_A_LAYER = 10


class Limits(NamedTuple):
    """Bytes and operations per second of one kind of kernels; each call takes `gap` more.

    With `overlaps`, bytes are moved during the operations, as on a GPU; otherwise before them.
    """

    bandwidth: float
    flops: float
    gap: float
    overlaps: bool = True


Machine = Mapping[Kind, Limits]


def seconds_of(kernel: Kernel, machine: Machine) -> float:
    """Return the duration of a kernel's calls."""
    limits = machine[kernel.kind]
    parts = kernel.bytes / limits.bandwidth, kernel.flops / limits.flops
    return (max(parts) if limits.overlaps else sum(parts)) + limits.gap * kernel.calls


@dataclass(frozen=True, slots=True)
class Reach:
    """The expected shares of a card's ceilings, and the seconds of a kernel's start.

    Passes and decodes have 85 % of a copy's bandwidth, prefill attention 350 of 790 TFLOP/s.
    """

    passes: float = 0.85
    attention: float = 0.85
    attention_flops: float = 350 / 790
    products: float = 0.9
    gap: float = 2e-6

    def limits(self, card: Card) -> Machine:
        """Return the kernels' rates on a card."""
        copy, flops, gap = card.bandwidth, card.flops, self.gap
        passes = Limits(copy * self.passes, flops, gap)
        return {
            "product": Limits(copy * self.products, flops * self.products, gap),
            "attention": Limits(copy * self.attention, flops * self.attention_flops, gap),
            "entry": passes,
            "pass": passes,
        }


@dataclass(frozen=True, slots=True)
class Host:
    """Host cost of a step: planning, packing, sampling, collecting, and launches.

    Steps up to the size that is worth it (ADR 54) are a graph, which is one launch. Overlapped, the
    host does all this while the device is at the step before, unless that must be
    collected before the next can be planned.
    """

    step: float = 1e-3
    sequence: float = 1e-6
    call: float = LAYER_SECONDS / CALLS_A_LAYER
    replay: float = 5e-5
    has_graphs: bool = True
    overlaps: bool = True

    def seconds(self, busy: float, launching: float, num_spans: int, *, waits: bool) -> float:
        """Return the time from one step to the next."""
        thinking = self.step + num_spans * self.sequence
        if self.overlaps and not waits:
            return max(busy, thinking + launching)
        return thinking + max(busy, launching)


REACH, HOST, FORM = Reach(), Host(), Form()


@dataclass(slots=True)
class Forecast:
    """Result of simulated steps: seconds, busy seconds of the device, tokens, and by kernel.

    `waits` counts the steps that could not be planned before another was collected.
    """

    seconds: float = 0.0
    busy: float = 0.0
    steps: int = 0
    waits: int = 0
    outputs: int = 0
    tokens: int = 0
    preemptions: int = 0
    by_kernel: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def outputs_per_second(self) -> float:
        """Return the rate of tokens for requests."""
        return self.outputs / self.seconds


class Room(NamedTuple):
    """Pages and rows of a card, and how many half-finished sequences they hold."""

    num_pages: int
    num_rows: int
    num_first: int


@dataclass(frozen=True, slots=True)
class Setting:
    """All settings of a forecast except the mix; limits that are None are those of the card."""

    model: Architecture
    card: Card
    reach: Reach = REACH
    host: Host = HOST
    form: Form = FORM
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def limits(self) -> StepLimits:
        """Return the limits of a step."""
        usual = next(limits for least, limits in LIMITS_OF_GPU if self.card.memory >= least)
        return StepLimits(
            self.max_num_seqs or usual.max_num_seqs,
            self.max_num_batched_tokens or usual.max_num_batched_tokens,
        )

    @property
    def pool(self) -> float:
        """Return the card's bytes for the state of sequences."""
        weights = Weights.from_model(self.model)
        return self.card.pool(weights.held * self.form.weight_itemsize)

    def groups(self, mix: Mix) -> tuple[LayerGroup, ...]:
        """Return the groups of attention layers."""
        return group_layers(self.model.attention_shapes, sum(mix))

    def room(self, mix: Mix) -> Room:
        """Return the card's pages and rows, divided as in the engine."""
        blocks = self.model.blocks
        groups, shapes = self.groups(mix), self.model.attention_shapes
        largest = max(groups, key=lambda group: len(group.layers)).layers
        a_page = sum(kv_bytes(shapes[layer]) for layer in largest) * PAGE_SIZE
        a_row = sum(map(state_bytes, blocks))
        limits = self.limits
        visible = [group.visible.most_visible if group.visible else 0 for group in groups]

        def pages(tokens: int) -> int:
            return sum(most_pages(tokens, PAGE_SIZE, most, limits[1]) for most in visible)

        pool, max_num_seqs = int(self.pool), limits.max_num_seqs
        num_rows = rows_of(pool, a_row, pages(TYPICAL_TOKENS) * a_page, max_num_seqs)
        num_pages = (pool - num_rows * a_row) // a_page
        own = num_pages - mix.shared // PAGE_SIZE
        num_first = min(max_num_seqs, own // pages(mix.prompt + mix.output // 2))
        if a_row:
            num_first = min(num_first, num_rows * ROWS_A_SNAPSHOT // (ROWS_A_SNAPSHOT + 1))
        return Room(num_pages, num_rows, max(1, num_first))

    @property
    def buckets(self) -> list[int]:
        """Return the sizes of steps that have a graph."""
        if not self.host.has_graphs:
            return []
        a_layer = Weights.from_model(self.model).active / len(self.model.blocks)
        most = round(LAYER_SECONDS * self.card.flops / (2 * a_layer))
        return list(buckets(min(most, self.limits.max_num_batched_tokens)))


def forecast(setting: Setting, mix: Mix, num_steps: int = NUM_STEPS) -> Forecast:
    """Return the results of a number of steps, after as many requests as fit have started."""
    room, (max_num_seqs, max_tokens) = setting.room(mix), setting.limits
    table = SequenceTable(max_num_seqs, sum(mix), PAGE_SIZE)
    pool = PagePool(room.num_pages)
    groups = further_groups(setting.groups(mix)[1:], pool, table, max_tokens)
    if room.num_rows:
        groups.append(Rows(PagePool(room.num_rows), PAGE_SIZE, max_num_seqs))
    scheduler = Scheduler(table, pool, ArrivalOrder(), max_tokens, keeps_ids=True, groups=groups)
    arrivals = count()
    supply = Supply(
        mix,
        scheduler,
        lambda request: scheduler.add(OneSequence(request, next(arrivals))),
        room.num_first,
        MANY_IDS,
    )
    supply.fill()
    found, before = Forecast(), scheduler.num_preemptions
    machine, sizes = setting.reach.limits(setting.card), setting.buckets
    in_flight: StepPlan | None = None
    for _ in range(num_steps):
        supply.top_up()
        plan = scheduler.plan()
        waits = plan is None
        if plan is None:
            assert in_flight is not None
            land(scheduler, in_flight)
            in_flight, plan = None, scheduler.plan()
            assert plan is not None
        add_step(found, setting, supply.spans(plan), machine, sizes, waits=waits)
        found.outputs += len(plan.sampled)
        scheduler.launch(plan)
        if in_flight is not None:
            land(scheduler, in_flight)
        in_flight = plan
        if not setting.host.overlaps:
            land(scheduler, plan)
            in_flight = None
    found.preemptions = scheduler.num_preemptions - before
    return found


def add_step(
    found: Forecast,
    setting: Setting,
    spans: Spans,
    machine: Machine,
    sizes: Sequence[int],
    *,
    waits: bool,
) -> None:
    """Add one step to a forecast, except for the tokens it samples; `sizes` have a graph."""
    host, form = setting.host, setting.form
    place = bisect_left(sizes, spans.num_tokens)
    found.tokens += spans.num_tokens
    if place < len(sizes):
        spans = spans._replace(filling=sizes[place] - spans.num_tokens)
        form = replace(form, last_rows_only=False)
    busy, calls = 0.0, 0
    for kernel in kernels_of(setting.model, spans, form):
        seconds = seconds_of(kernel, machine)
        busy += seconds
        calls += kernel.calls
        found.by_kernel[kernel.name] += seconds
    launching = host.replay if place < len(sizes) else calls * host.call
    found.seconds += host.seconds(busy, launching, len(spans.starts), waits=waits)
    found.busy += busy
    found.steps += 1
    found.waits += waits


def levers(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield the setting and variants of it, each without one feature."""
    host, form = setting.host, setting.form
    yield "as it is built", setting
    yield "host and device in turns", replace(setting, host=replace(host, overlaps=False))
    yield "no graphs", replace(setting, host=replace(host, has_graphs=False))
    both = replace(host, has_graphs=False, overlaps=False)
    yield "neither", replace(setting, host=both)
    yield "sums and norms apart", replace(setting, form=replace(form, joins_norms=False))
    apart = replace(form, joins_entry=False)
    yield "norms of heads, turns, storing apart", replace(setting, form=apart)
    yield "all rows to the end", replace(setting, form=replace(form, last_rows_only=False))
    alone = replace(form, meets_shared_once=False)
    yield "shared pages met by each", replace(setting, form=alone)
    yield "logits sorted", replace(setting, form=replace(form, chooses_at_once=False))
    ceilings = Reach(1, 1, 1, 1, 0)
    yield "kernels at the card's ceilings", replace(setting, reach=ceilings)


def table(
    ways: Sequence[tuple[str, Setting]], mixes: Sequence[Mix], num_steps: int
) -> Iterator[str]:
    """Yield the lines of a table as they become known."""
    yield (
        "| in/out | | step, ms | tokens a step | gave way, a step | waited | device busy "
        "| out tok/s | of the roofline |"
    )
    yield "|---|---|" + "---:|" * 7
    for mix in mixes:
        for name, setting in ways:
            found = forecast(setting, mix, num_steps)
            itemsize = setting.form.weight_itemsize
            bound = serial(setting.model, setting.card, mix, itemsize).outputs_per_second
            rate, steps = found.outputs_per_second, found.steps
            yield (
                f"| {mix} | {name} | {found.seconds / steps * 1e3:.1f} "
                f"| {found.tokens / steps:,.0f} | {found.preemptions / steps:.2f} "
                f"| {found.waits / steps:.0%} | {found.busy / found.seconds:.0%} "
                f"| {rate:,.0f} | {rate / bound:.0%} |"
            )


def main() -> None:
    """Print one model's forecast for one card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument(
        "--model", default="llama-3-8b", help="use a known shape, or a model folder"
    )
    parser.add_argument("--mixes", default=",".join(map(str, MIXES)))
    parser.add_argument(
        "--max-num-seqs", type=int, help="set the sequences per step (default: the card's)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, help="set the tokens per step (default: the card's)"
    )
    parser.add_argument(
        "--weight-itemsize", type=float, default=ITEMSIZE, help="set the bytes per weight"
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument(
        "--levers", action="store_true", help="also show results without one feature at a time"
    )
    arguments = parser.parse_args()
    setting = Setting(
        architecture(arguments.model),
        CARDS[arguments.card],
        form=Form(weight_itemsize=arguments.weight_itemsize),
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    mixes = tuple(map(Mix.read, arguments.mixes.split(",")))
    ways = list(levers(setting)) if arguments.levers else [("as it is built", setting)]
    for line in table(ways, mixes, arguments.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
