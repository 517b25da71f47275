"""Python cost of a step, whatever the model: planning, packing, sampling, collecting.

    python -m bench.kernels.scheduler_cost [--sequences 64,256,1024] [--steps-ahead 0]

The model takes no time and its answers are constant. Each situation runs until it is stable. Then
its steps are timed one by one, in processor time: the median, the mean, and the longest of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from tidemill.engine.kernels.attention import AttentionBackend
from tidemill.engine.kernels.step import Step
from tidemill.engine.loop.encoding import EncodingCore
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.loop.runner import Runner
from tidemill.engine.model.encoders.loaded_encoder import LoadedEncoder
from tidemill.engine.model.encoders.pooler import Pooler
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.scheduling.admission import ArrivalOrder
from tidemill.engine.scheduling.encoding import EncodingRequest
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.pages import PagePool

PAGE_SIZE = 16
MAX_MODEL_LEN = 2048
NUM_STEPS = 128
VOCABULARY = 24
GREEDY = Sampling(temperature=0)
FOREVER = MAX_MODEL_LEN


class Times(NamedTuple):
    """Milliseconds of one step: the median of many, their mean, and the longest."""

    median: float
    mean: float
    longest: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Times:
        """Return the figures of some times."""
        return cls(statistics.median(times), statistics.mean(times), max(times))


class Silence:
    """A model, its network and its attention, that computes nothing."""

    device = torch.device("cpu")
    num_layers_started = 0
    vision_encoder = None

    @property
    def network(self) -> Silence:
        """Return the function that runs a step."""
        return self

    def prepare(self, step: Step) -> None:
        """Do nothing with keys and values."""

    def check(self) -> None:
        """Do nothing: there is no error."""

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Return constant logits."""
        del attention
        return torch.zeros(len(step.logit_rows), VOCABULARY)


class Situation:
    """Generation of up to `num_seqs` sequences at a time, over a pool of `num_pages` pages."""

    def __init__(
        self, num_sequences: int, num_pages: int, steps_ahead: int, sampling: Sampling = GREEDY
    ) -> None:
        self._sampling = sampling
        table = SequenceTable(num_sequences, MAX_MODEL_LEN, PAGE_SIZE)
        # Requests that arrive together start in one step.
        scheduler = Scheduler(table, PagePool(num_pages), ArrivalOrder(), num_sequences * 128)
        silence = Silence()
        runner = Runner(cast("LoadedModel", silence), cast("AttentionBackend", silence), table)
        self.rng = np.random.default_rng(num_sequences)
        self.core = GenerationCore(scheduler, runner, VOCABULARY, steps_ahead)

    def add(self, num_prompt_tokens: int, max_tokens: int, beginning: Sequence[int] = ()) -> None:
        """Request a sequence whose prompt is unique, except for its beginning."""
        num_own = num_prompt_tokens - len(beginning)
        prompt = [*beginning, *self.rng.integers(0, 1 << 20, num_own).tolist()]
        self.core.add(SequenceRequest(prompt, max_tokens, self._sampling))

    def time(self, supply: Callable[[], object] = lambda: None) -> Times:
        """Warm up, then time steps, each after an untimed call of `supply`."""
        times = []
        for _ in range(2 * NUM_STEPS):
            supply()
            started = time.thread_time()
            self.core.step()
            times.append((time.thread_time() - started) * 1e3)
        return Times.of(times[NUM_STEPS:])


def decoding(num_sequences: int, steps_ahead: int) -> Times:
    """All decode; one in sixteen fills a page in each step."""
    situation = Situation(num_sequences, num_sequences * 32, steps_ahead)
    for place in range(num_sequences):
        situation.add(100 + place % PAGE_SIZE, FOREVER)
    return situation.time()


def scored(num_sequences: int, steps_ahead: int) -> Times:
    """All decode, each with the 20 likeliest of each token."""
    situation = Situation(
        num_sequences, num_sequences * 32, steps_ahead, replace(GREEDY, logprobs=20)
    )
    for place in range(num_sequences):
        situation.add(100 + place % PAGE_SIZE, FOREVER)
    return situation.time()


def in_step(num_sequences: int, steps_ahead: int) -> Times:
    """All decode, and all of them fill a page in the same step, one step in sixteen."""
    situation = Situation(num_sequences, num_sequences * 32, steps_ahead)
    for _ in range(num_sequences):
        situation.add(100, FOREVER)
    return situation.time()


def coming_and_going(num_sequences: int, steps_ahead: int) -> Times:
    """Sequences of 64 to 192 tokens end, and others start in their place; 200 wait behind them."""
    situation = Situation(num_sequences, num_sequences * 32, steps_ahead)

    def supply() -> None:
        while situation.core.stats().waiting < 200:
            situation.add(165, int(situation.rng.integers(64, 192)))

    return situation.time(supply)


def blocked(num_sequences: int, steps_ahead: int) -> Times:
    """The same on few pages, for which one in eight waits long, with most of its prompt cached."""
    situation = Situation(2 * num_sequences, num_sequences * 16, steps_ahead)
    document = situation.rng.integers(0, 1 << 20, 960).tolist()

    def supply() -> None:
        while situation.core.stats().waiting < 200:
            situation.add(1900, 64, document)
            for _ in range(7):
                situation.add(165, int(situation.rng.integers(64, 192)))

    return situation.time(supply)


def short_of_pages(num_sequences: int, steps_ahead: int) -> Times:
    """All decode on fewer pages than they need: the youngest are preempted."""
    situation = Situation(num_sequences, num_sequences * 16, steps_ahead)
    for place in range(num_sequences):
        situation.add(100 + place % PAGE_SIZE, FOREVER)
    return situation.time()


class SilentEncoder(Silence):
    """An encoder, its network and its attention, that computes nothing."""

    max_model_len = MAX_MODEL_LEN
    num_types = 1
    page_size = PAGE_SIZE
    pooler = Pooler(("cls",))
    recurrent_shapes = decision_network = image_tower = None

    @property
    def backend(self) -> SilentEncoder:
        """Return the class of the attention, as far as it is used."""
        return self

    def attention(self, *_: object) -> SilentEncoder:
        """Return the attention of any size."""
        return self

    def encode(self, step: Step, *_: object) -> Tensor:
        """Return a constant vector for each text."""
        return torch.zeros(len(step.logit_rows), VOCABULARY)


def texts(num_sequences: int, steps_ahead: int) -> Times:
    """One step of texts of 40 tokens by an encoder, from their arrival to their results."""
    model = cast("LoadedEncoder", SilentEncoder())
    core = EncodingCore(model, num_sequences * 40, num_sequences, steps_ahead)
    rng = np.random.default_rng(num_sequences)
    times = []
    for _ in range(NUM_STEPS):
        requests = [
            EncodingRequest(ids) for ids in rng.integers(0, 1 << 20, (num_sequences, 40)).tolist()
        ]
        started = time.thread_time()
        for request in requests:
            core.add(request)
        while core.step() is not None:
            pass
        times.append((time.thread_time() - started) * 1e3)
    return Times.of(times)


SITUATIONS = (decoding, scored, in_step, coming_and_going, blocked, short_of_pages, texts)


def table(counts: list[int], steps_ahead: int) -> Iterator[str]:
    """Yield the lines of a table as they become known."""
    yield "| sequences | situation | median, ms | mean | longest |"
    yield "|---:|---|---:|---:|---:|"
    for count in counts:
        for situation in SITUATIONS:
            times = " | ".join(f"{each:.2f}" for each in situation(count, steps_ahead))
            yield f"| {count:,} | {situation.__name__.replace('_', ' ')} | {times} |"


def main() -> None:
    """Measure every situation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sequences",
        default="64,256,1024",
        help="measure these numbers, comma-separated (%(default)s)",
    )
    parser.add_argument("--steps-ahead", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for line in table(list(map(int, arguments.sequences.split(","))), arguments.steps_ahead):
        print(line, flush=True)


if __name__ == "__main__":
    main()
