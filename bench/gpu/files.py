"""Whole files on a simulated GPU: in the order of the plan and in that of arrival.

    python -m bench.gpu.files [--card h100] [--model llama-3-8b] [--files documents,tail,…]
        [--ways plan,…] [--kv-cache-tokens N] [--max-num-seqs N] [--max-num-batched-tokens N]

Each file runs to its end through the engine's own plan and scheduler; steps take the time that
`bench.gpu.simulator` counts for them. *Arrival* is `tidemill run --no-plan`; *prefix order* is the
engine's own order of waiting requests; *plan* is the order of `offline/plan`. *Full* is the mean
use of the KV cache, *prefilled* the computed prompt tokens relative to the minimum.
Nothing here was measured on a card.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
from pydantic_core import to_json

from bench.gpu.cards import CARDS
from bench.gpu.mixes import Mix
from bench.gpu.shapes import architecture
from bench.gpu.simulator import PAGE_SIZE, Forecast, Setting, add_step
from bench.gpu.supply import land, spans_of
from tidemill.batch.file.lines import RawLine
from tidemill.batch.shard_cutter import ShardCutter, ShardLimits
from tidemill.engine.scheduling.admission import Admission, ArrivalOrder, PrefixOrder
from tidemill.engine.scheduling.kv_forecast import KVForecast
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.engine.scheduling.sequence import Sequence as OneSequence
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.pages import PagePool
from tidemill.handler.worker.shard.line_order import LineOrder, Rank, block_hashes
from tidemill.offline.plan.line_index import LineIndex
from tidemill.offline.plan.plan import Plan

GREEDY = Sampling(temperature=0)
WAITING_A_SEQUENCE = 4
MAX_MODEL_LEN = 4096
BYTES_A_TOKEN = 4


class Line(NamedTuple):
    """A request: its prompt's tokens, and those of its answer."""

    prompt: list[int]
    output: int


class Tokens:
    """Texts of random tokens from one seed."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __call__(self, num_tokens: int) -> list[int]:
        """Return a new text."""
        ids: list[int] = self.rng.integers(1, 100_000, num_tokens).tolist()
        return ids


def documents(texts: Tokens) -> list[Line]:
    """500 documents of 1,500 tokens, 16 questions to each."""
    found = [texts(1500) for _ in range(500)]
    return [Line(found[number // 16] + texts(20), 64) for number in range(8_000)]


def heavy_tail(texts: Tokens) -> list[Line]:
    """Prompts of 60 tokens; answers of 8 to 2,048, by a Pareto distribution that is cut."""
    lengths = np.minimum(2048, 8 * (1 + texts.rng.pareto(0.6, 16_000)))
    return [Line(texts(60), int(length)) for length in lengths]


def two_kinds(texts: Tokens) -> list[Line]:
    """Long prompts with short answers, and short prompts with long ones."""
    reading = [Line(texts(1500), 16) for _ in range(4_000)]
    return reading + [Line(texts(60), 512) for _ in range(4_000)]


def alike(texts: Tokens) -> list[Line]:
    """Prompts of 165 tokens and answers of 128, where a plan cannot help."""
    return [Line(texts(165), 128) for _ in range(8_000)]


def long_answers(texts: Tokens) -> list[Line]:
    """Short prompts with answers of 1,024 tokens."""
    return [Line(texts(128), 1024) for _ in range(3_000)]


def reasoning(texts: Tokens) -> list[Line]:
    """Short prompts with long answers of very different lengths."""
    lengths = np.minimum(3900, texts.rng.lognormal(7, 0.6, 3_000))
    return [Line(texts(100), int(length)) for length in lengths]


def by_question(texts: Tokens) -> list[Line]:
    """The same question to each of 2,000 documents of 1,500 tokens, then the next of 16."""
    found, questions = [texts(1500) for _ in range(2_000)], [texts(20) for _ in range(16)]
    return [Line(document + question, 64) for question in questions for document in found]


FILES: dict[str, Callable[[Tokens], list[Line]]] = {
    "documents": documents,
    "tail": heavy_tail,
    "kinds": two_kinds,
    "alike": alike,
    "long": long_answers,
    "reasoning": reasoning,
    "questions": by_question,
}
SORTED = ("questions",)


def planned(lines: list[Line], *, is_ordered: bool = True) -> list[int]:
    """Return the places of lines in the order of a plan, or in that of the file."""
    with closing(LineIndex()) as index:
        for number, line in enumerate(lines):
            body = {"prompt": line.prompt, "max_tokens": line.output, "temperature": 0}
            index.add(0, 0, number, body)
        return [*Plan(index, lambda _: False, is_ordered=is_ordered)]


def by_shards(lines: list[Line], num_shards: int) -> list[int]:
    """Return the places of lines as handed out by a worker that claims several shards at once."""
    cutter, orders, end = ShardCutter("simulated", ShardLimits()), list[LineOrder](), 0
    ranks = list[Rank]()
    for number, line in enumerate(lines, start=1):
        start, end = end, end + BYTES_A_TOKEN * len(line.prompt)
        cutter.add(number, start, end)
        if cutter.number // num_shards == len(orders):
            orders.append(LineOrder(len(orders)))
        request = {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": line.prompt}}
        ranks += orders[-1].add([block_hashes(RawLine(number, to_json(request)))])
    return sorted(range(len(lines)), key=ranks.__getitem__)


class Way(NamedTuple):
    """A way to run a file."""

    name: str
    order: Callable[[list[Line]], list[int]]
    admission: Callable[[], Admission]
    has_forecast: bool


IN_ORDER = partial(planned, is_ordered=False)
WAYS = (
    Way("arrival", IN_ORDER, ArrivalOrder, has_forecast=False),
    Way("prefix order", IN_ORDER, PrefixOrder, has_forecast=False),
    Way("a shard", partial(by_shards, num_shards=1), PrefixOrder, has_forecast=True),
    Way("4 shards", partial(by_shards, num_shards=4), PrefixOrder, has_forecast=True),
    Way("16 shards", partial(by_shards, num_shards=16), PrefixOrder, has_forecast=True),
    Way("plan, no forecast", planned, ArrivalOrder, has_forecast=False),
    Way("plan", planned, ArrivalOrder, has_forecast=True),
)


class Result(NamedTuple):
    """The results of a file."""

    found: Forecast
    prefilled: int
    usage: float


def run(setting: Setting, lines: list[Line], way: Way, num_pages: int) -> Result:
    """Run a file to its end."""
    max_num_seqs, max_tokens = setting.limits
    table = SequenceTable(max_num_seqs, MAX_MODEL_LEN, PAGE_SIZE)
    pool = PagePool(num_pages)
    forecast = KVForecast(table, pool) if way.has_forecast else None
    scheduler = Scheduler(
        table, pool, way.admission(), max_tokens, keeps_ids=True, forecast=forecast
    )
    order, arrivals = iter(way.order(lines)), count()
    machine, sizes = setting.reach.limits(setting.card), setting.buckets
    found, in_flight, prefilled = Forecast(), list[StepPlan](), 0
    used = list[float]()
    while True:
        while scheduler.num_waiting < WAITING_A_SEQUENCE * max_num_seqs:
            if (place := next(order, None)) is None:
                break
            request = SequenceRequest(lines[place].prompt, lines[place].output, GREEDY)
            scheduler.add(OneSequence(request, next(arrivals)))
        plan = scheduler.plan()
        if waits := plan is None:
            if not in_flight:
                found.preemptions = scheduler.num_preemptions
                return Result(found, prefilled, float(np.mean(used)))
            land(scheduler, in_flight.pop())
            continue
        add_step(found, setting, spans_of(table, plan), machine, sizes, waits=waits)
        prefilled += int((plan.stops - plan.starts).sum()) - plan.num_decodes
        found.outputs += len(plan.sampled)
        used.append(1 - pool.num_free / pool.num_pages)
        scheduler.launch(plan)
        if in_flight:
            land(scheduler, in_flight.pop())
        in_flight.append(plan)


def rows(
    setting: Setting, names: Sequence[str], ways: Sequence[str], num_pages: int
) -> Iterator[str]:
    """Yield the lines of a table as they become known."""
    yield (
        "| file | way | steps | gave way | prefilled | full | seconds | of arrival |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|"
    )
    for name in names:
        texts = Tokens()
        lines = FILES[name](texts)
        if name not in SORTED:
            lines = [lines[place] for place in texts.rng.permutation(len(lines))]
        least = sum(least_tokens(lines))
        seconds = 0.0
        for way in (way for way in WAYS if way.name in ways):
            result = run(setting, lines, way, num_pages)
            seconds = seconds or result.found.seconds
            yield (
                f"| {name} | {way.name} | {result.found.steps:,} | {result.found.preemptions:,} "
                f"| {result.prefilled / least:.2f} | {result.usage:.0%} "
                f"| {result.found.seconds:.1f} | {seconds / result.found.seconds:.2f} × |"
            )


def least_tokens(lines: list[Line]) -> Iterator[int]:
    """Yield each prompt's addition to the prefix tree of all."""
    before: list[int] = []
    for prompt in sorted(line.prompt for line in lines):
        pairs = zip(before, prompt, strict=False)
        common = next((at for at, (a, b) in enumerate(pairs) if a != b), len(before))
        yield len(prompt) - common
        before = prompt


def main() -> None:
    """Print the predicted cost of the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=CARDS, default="h100")
    parser.add_argument(
        "--model", default="llama-3-8b", help="use a known shape, or a model folder"
    )
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--ways", default=",".join(way.name for way in WAYS))
    parser.add_argument(
        "--kv-cache-tokens", type=int, help="set the size of the KV cache (default: the card's)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, help="set the sequences per step (default: the card's)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, help="set the tokens per step (default: the card's)"
    )
    arguments = parser.parse_args()
    setting = Setting(
        architecture(arguments.model),
        CARDS[arguments.card],
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    num_pages = setting.room(Mix(1024, 128)).num_pages
    if arguments.kv_cache_tokens:
        num_pages = arguments.kv_cache_tokens // PAGE_SIZE
    for line in rows(setting, arguments.files.split(","), arguments.ways.split(","), num_pages):
        print(line, flush=True)


if __name__ == "__main__":
    main()
