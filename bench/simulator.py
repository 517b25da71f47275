"""What a card would give before there is one: steps as the scheduler plans them, timed by counting.

    python -m bench.simulator [--card h200] [--model llama-3-8b] [--mixes 1024/128,220/200]
        [--max-num-seqs 1024] [--max-num-batched-tokens 8192] [--levers]

Each step that the engine's own scheduler plans takes, for each of its kernels, the time of its
bytes or of its operations, whichever is longer (`bench.counts`), at what kernels are held to reach
of the card's ceilings, and a gap for each kernel's start; beside it stands what the host does.
With `--levers` the same without one thing at a time: what each overlap and each pass is worth. The
share is that of the serial roofline (`bench.roofline`). Nothing here was measured on a card.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from bench.cards import CARDS, Card
from bench.counts import Form, Kernel, Kind, Spans, kernels_of
from bench.roofline import ITEMSIZE, MIXES, Mix, Weights, kv_bytes, serial
from bench.shapes import architecture
from engine.model.architecture import Architecture
from engine.scheduling.admission import ArrivalOrder
from engine.scheduling.pages import PagePool
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.sequence import Sequence as OneSequence
from engine.scheduling.sequence import SequenceRequest
from engine.scheduling.table import SequenceTable

PAGE_SIZE = 16
NUM_STEPS = 2048
NUM_WAITING = 64
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 8192


class Limits(NamedTuple):
    """Bytes and operations a second that kernels of one kind reach; each call takes `gap` more."""

    bandwidth: float
    flops: float
    gap: float


Machine = Mapping[Kind, Limits]


def seconds_of(kernel: Kernel, machine: Machine) -> float:
    """Return how long so many calls of a kernel take."""
    limits = machine[kernel.kind]
    bound = max(kernel.bytes / limits.bandwidth, kernel.flops / limits.flops)
    return bound + limits.gap * kernel.calls


@dataclass(frozen=True, slots=True)
class Reach:
    """The shares of a card's ceilings that kernels are held to, and the seconds that a start takes.

    Passes and decodes 85 % of a copy's bandwidth, prefill attention 350 of 790 TFLOP/s.
    """

    passes: float = 0.85
    attention: float = 0.85
    attention_flops: float = 350 / 790
    products: float = 0.9
    gap: float = 2e-6

    def of(self, card: Card) -> Machine:
        """Return what kernels reach on a card."""
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
    """What a step costs the host: planned, packed, sampled and collected, and what launches cost.

    A launch from Python takes some 8 µs, a graph one launch for up to `graphed` tokens. Overlapped,
    the host does all this while the device is at the step before.
    """

    step: float = 1.5e-3
    sequence: float = 1e-6
    call: float = 8e-6
    replay: float = 5e-5
    graphed: int = 1024
    overlaps: bool = True

    def seconds(self, on_device: float, num_calls: int, num_tokens: int, num_spans: int) -> float:
        """Return how long it is from one step to the next."""
        launching = self.replay if num_tokens <= self.graphed else num_calls * self.call
        thinking = self.step + num_spans * self.sequence
        if self.overlaps:
            return max(on_device, thinking + launching)
        return thinking + max(on_device, launching)


REACH, HOST, FORM = Reach(), Host(), Form()


@dataclass(slots=True)
class Forecast:
    """What steps came to: seconds, those in which the device was busy, tokens, and by kernel."""

    seconds: float = 0.0
    busy: float = 0.0
    steps: int = 0
    outputs: int = 0
    tokens: int = 0
    preemptions: int = 0
    by_kernel: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def outputs_per_second(self) -> float:
        """Return the rate that requests see."""
        return self.outputs / self.seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a forecast goes by, but the mix."""

    model: Architecture
    card: Card
    reach: Reach = REACH
    host: Host = HOST
    form: Form = FORM
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS


class Supply:
    """Requests of one mix without end, over the engine's own scheduler.

    Those that start first have been at it for a while: their outputs so far are of their prompts,
    so that the mixture that lasts is there from the start.
    """

    def __init__(self, mix: Mix, num_pages: int, setting: Setting) -> None:
        self._mix = mix
        self._rng = np.random.default_rng(0)
        self._beginning = self._ids(mix.shared)
        length = mix.shared + mix.prompt + mix.output
        self.table = SequenceTable(setting.max_num_seqs, length, PAGE_SIZE)
        pool = PagePool(num_pages)
        self.scheduler = Scheduler(self.table, pool, ArrivalOrder(), setting.max_num_batched_tokens)
        self._num_added = 0
        own = num_pages * PAGE_SIZE / (mix.prompt + mix.output / 2)
        for _ in range(min(setting.max_num_seqs, int(own))):
            self._add(int(self._rng.integers(0, mix.output)))
        self.num_first, self.num_started = self._num_added, 0

    def plan(self) -> StepPlan:
        """Return the next step; somebody always waits."""
        while self.scheduler.num_waiting < NUM_WAITING:
            self._add(0)
        plan = self.scheduler.plan()
        assert plan is not None
        self.num_started += int(plan.starts_anew.sum())
        return plan

    def collect(self, plan: StepPlan) -> None:
        """Let a step have been computed."""
        table, slots = self.table, plan.sampled
        self.scheduler.launch(plan)
        nothing = np.zeros(len(slots), np.int64)
        self.scheduler.collect(plan, nothing, nothing.astype(np.bool_))
        for slot in slots[table.num_known[slots] >= table.max_tokens[slots]].tolist():
            self.scheduler.finish(slot)

    def spans(self, plan: StepPlan) -> Spans:
        """Return what a step computes, and what of it is shared."""
        shared = 0
        if self._mix.shared:
            counts = -(-plan.stops // PAGE_SIZE)
            rows = self.table.pages[plan.slots]
            met = rows[np.arange(rows.shape[1]) < counts[:, None]]
            shared = (len(met) - len(np.unique(met))) * PAGE_SIZE
        return Spans(plan.starts, plan.stops, int(plan.num_logits.sum()), shared)

    def _add(self, done: int) -> None:
        prompt = [*self._beginning, *self._ids(self._mix.prompt + done)]
        request = SequenceRequest(prompt, self._mix.output - done)
        self.scheduler.add(OneSequence(request, self._num_added))
        self._num_added += 1

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(1, 1 << 30, count).tolist()
        return ids


def forecast(setting: Setting, mix: Mix, num_steps: int = NUM_STEPS) -> Forecast:
    """Return what so many steps come to, once all that fit have started."""
    model, card = setting.model, setting.card
    a_page = sum(kv_bytes(block.attention) for block in model.blocks) * PAGE_SIZE
    num_pages = int(card.pool(Weights.of(model).held * ITEMSIZE) / a_page)
    supply = Supply(mix, num_pages, setting)
    while supply.num_started < supply.num_first:
        supply.collect(supply.plan())
    machine, found = setting.reach.of(card), Forecast()
    before = supply.scheduler.num_preemptions
    for _ in range(num_steps):
        plan = supply.plan()
        spans = supply.spans(plan)
        take_in(found, kernels_of(model, spans, setting.form), spans, machine, setting.host)
        found.outputs += len(plan.sampled)
        supply.collect(plan)
    found.preemptions = supply.scheduler.num_preemptions - before
    return found


def take_in(
    found: Forecast, kernels: Sequence[Kernel], spans: Spans, machine: Machine, host: Host
) -> None:
    """Add one step to a forecast, but for the tokens that it samples."""
    busy = 0.0
    for kernel in kernels:
        seconds = seconds_of(kernel, machine)
        busy += seconds
        found.by_kernel[kernel.name] += seconds
    calls = sum(kernel.calls for kernel in kernels)
    found.seconds += host.seconds(busy, calls, spans.num_tokens, len(spans.starts))
    found.busy += busy
    found.steps += 1
    found.tokens += spans.num_tokens


def levers(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield the setting and what it is without one thing each."""
    host, form = setting.host, setting.form
    yield "as it is built", setting
    yield "host and device in turns", replace(setting, host=replace(host, overlaps=False))
    yield "no graphs", replace(setting, host=replace(host, graphed=0))
    both = replace(host, graphed=0, overlaps=False)
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
    """Yield the lines of a table, each when it is known."""
    yield (
        "| in/out | | step, ms | tokens a step | preempted a step | device busy | out tok/s "
        "| of the roofline |"
    )
    yield "|---|---|" + "---:|" * 6
    for mix in mixes:
        for name, setting in ways:
            found = forecast(setting, mix, num_steps)
            bound = serial(setting.model, setting.card, mix).outputs_per_second
            rate = found.outputs_per_second
            yield (
                f"| {mix} | {name} | {found.seconds / found.steps * 1e3:.1f} "
                f"| {found.tokens / found.steps:,.0f} | {found.preemptions / found.steps:.2f} "
                f"| {found.busy / found.seconds:.0%} "
                f"| {rate:,.0f} | {rate / bound:.0%} |"
            )


def main() -> None:
    """Print what one model would give on one card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument("--model", default="llama-3-8b", help="a known shape, or a folder")
    parser.add_argument("--mixes", default=",".join(map(str, MIXES)))
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS)
    parser.add_argument("--max-num-batched-tokens", type=int, default=MAX_NUM_BATCHED_TOKENS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--levers", action="store_true", help="and without one thing at a time")
    arguments = parser.parse_args()
    setting = Setting(
        architecture(arguments.model),
        CARDS[arguments.card],
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    mixes = tuple(map(Mix.read, arguments.mixes.split(",")))
    ways = list(levers(setting)) if arguments.levers else [("as it is built", setting)]
    for line in table(ways, mixes, arguments.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
