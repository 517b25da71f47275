"""Predicted and measured step times on this machine's CPU.

    python -m bench.gpu.prediction [--model 46m] [--dtype bfloat16] [--threads 2]

The ceilings are measured in the same run: the rate of a copy, the rates of our kernels of each kind
with enough work, and the time of a step of an equally deep model of almost no width, which
represents the host. Then `bench.gpu.counts` alone predicts every shape of step, timed as the loop
runs it. For comparison there is the prediction of the two ceilings of copies and products, with the
same host. Figures are the first decile of runs; with one thread they are processor time, and the
rest includes other programs on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod

import numpy as np
import torch

from bench.gpu.counts import Form, Spans, attention, entry, kernels_of
from bench.gpu.random_models import loaded, random_weights
from bench.gpu.shapes import architecture
from bench.gpu.simulator import Limits, Machine, seconds_of
from bench.kernels.attention_cost import Sequences, attending, copying
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels.attention import AttentionShape, HeadNorms
from tidemill.engine.kernels.backends import choose_elementwise, choose_linear
from tidemill.engine.kernels.cpu.attention import CpuAttention
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.config.architecture import Architecture
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

CPU = torch.device("cpu")
Clock = Callable[[], float]
GREEDY = Sampling(temperature=0)
RUNS = 20
COPIED_BYTES = 1 << 28
NUM_TOKENS = 2048
MAX_MODEL_LEN = 2048
CONTEXT = 1024
NUM_PLACES = 160_000  # of keys and values
FEW, MANY = 8, 256
DECODES = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of `decodes` after a context, together with prompts."""

    decodes: int
    context: int
    prompts: int = 0
    prompt: int = 0

    def __str__(self) -> str:
        """Return it in words."""
        of = [f"{self.decodes} × 1 after {self.context}"] * bool(self.decodes)
        of += [f"{self.prompts} × {self.prompt}"] * bool(self.prompts)
        return " + ".join(of)


SHAPES = (
    Shape(1, 64),
    Shape(8, 256),
    Shape(32, 256),
    Shape(64, 1024),
    Shape(256, 256),
    Shape(96, 960),
    Shape(0, 0, 1, 2000),
    Shape(0, 0, 12, 166),
    Shape(128, 512, 10, 166),
    Shape(240, 240, 1, 166),
)


def spans_of(shape: Shape) -> Spans:
    """Return the step's kernels."""
    counts = [shape.decodes, shape.prompts]
    starts = np.repeat([shape.context, 0], counts)
    stops = np.repeat([shape.context + 1, shape.prompt], counts)
    return Spans(starts, stops, len(starts))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of copies and kernels, and the host's seconds by number of sequences."""

    copy: float
    machine: Machine
    host: Callable[[int], float]


def ceilings(model: Architecture, dtype: torch.dtype, clock: Clock) -> Ceilings:
    """Measure them; call it before torch's threads are reduced."""
    machine: Machine = {
        "product": of_products(model, dtype, clock),
        "attention": of_attention(model.blocks[0].attention, clock),
        "entry": of_entry(model, dtype, clock),
        "pass": of_passes(model.hidden_size, dtype, clock),
    }
    copy = COPIED_BYTES / quick(copying(COPIED_BYTES), clock)
    return Ceilings(copy, machine, host_of(model, dtype, clock))


def host_of(model: Architecture, dtype: torch.dtype, clock: Clock) -> Callable[[int], float]:
    """Measure a step's cost outside its arithmetic: a model as deep, with next to no width."""
    narrow = architecture("tiny")
    steps = Steps(replace(narrow, blocks=narrow.blocks[:1] * len(model.blocks)), dtype, clock)
    few, many = (steps.measure(Shape(count, RUNS)) for count in (FEW, MANY))
    return lambda count: few + (many - few) * (count - FEW) / (MANY - FEW)


def of_passes(hidden: int, dtype: torch.dtype, clock: Clock) -> Limits:
    """Measure sums with their norms."""
    blocks = choose_elementwise(dtype, CPU)
    rows, residual = torch.randn(2, NUM_TOKENS, hidden).to(dtype)
    weight = blocks.norm_weight(torch.ones(hidden, dtype=dtype), 0.0)
    seconds = quick(lambda: blocks.add_rms_norm(rows, residual, weight, 1e-6), clock)
    return Limits(4 * residual.nbytes / seconds, inf, 0.0)


def of_attention(shape: AttentionShape, clock: Clock) -> Limits:
    """Measure a long chunk, and long decodes."""
    chunk, decodes = Sequences(1, 0, NUM_TOKENS), Sequences(DECODES, CONTEXT, 1)
    of_chunk = attention(shape, spans_of(Shape(0, 0, 1, NUM_TOKENS)), Form())
    of_decodes = attention(shape, spans_of(Shape(DECODES, CONTEXT)), Form())
    return Limits(
        of_decodes.bytes / quick(attending(shape, decodes), clock),
        of_chunk.flops / quick(attending(shape, chunk), clock),
        0.0,
    )


def of_products(model: Architecture, dtype: torch.dtype, clock: Clock) -> Limits:
    """Measure one layer's products with many rows, and with one row that is in no cache.

    In between, a core waits for most of its reads: 16 rows take 7.4 ms, though reading takes 4.2
    and computing 4.6.
    """
    shape, hidden, inner = model.blocks[0].attention, model.hidden_size, model.intermediate_size
    queries = shape.num_query_heads * shape.key_dim
    heads = queries + shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    sizes = [(heads, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    seconds = sum(_multiplying(*size, NUM_TOKENS, dtype, clock) for size in sizes)
    height = COPIED_BYTES // dtype.itemsize // NUM_TOKENS
    return Limits(
        COPIED_BYTES / _multiplying(height, NUM_TOKENS, 1, dtype, clock),
        2 * NUM_TOKENS * sum(map(prod, sizes)) / seconds,
        0.0,
        overlaps=False,
    )


def _multiplying(outputs: int, inputs: int, rows: int, dtype: torch.dtype, clock: Clock) -> float:
    products = choose_linear(choose_elementwise(dtype, CPU), CPU)
    multiply = products.make(torch.randn(outputs, inputs).to(dtype))
    return quick(partial(multiply, torch.randn(rows, inputs).to(dtype)), clock)


def of_entry(model: Architecture, dtype: torch.dtype, clock: Clock) -> Limits:
    """Measure heads that are normed, rotated and stored."""
    block = model.blocks[0]
    shape, width = block.attention, block.attention.key_dim
    heads = shape.num_query_heads + 2 * shape.num_kv_heads
    step, num_pages = Sequences(1, 0, NUM_TOKENS).step()
    backend = TouchedAttention([shape], num_pages, dtype, CPU)
    backend.prepare(step)
    cos_sin = torch.ones(NUM_TOKENS, 2 * len(block.rope.inv_freq))
    weight = choose_elementwise(dtype, CPU).norm_weight(torch.ones(width, dtype=dtype), 0.0)
    norms = HeadNorms(weight, weight, model.rms_norm_eps) if model.has_qk_norm else None
    qkv = torch.randn(NUM_TOKENS, heads * width).to(dtype)
    seconds = quick(partial(backend.store_qkv, 0, qkv, cos_sin, norms), clock)
    return Limits(entry(shape, NUM_TOKENS, dtype.itemsize).bytes / seconds, inf, 0.0)


class TouchedAttention(CpuAttention):
    """The CPU's backend with preallocated memory, as after some time of running."""

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shapes, num_pages, dtype, device)
        for words in (*self.keys, *self.values):
            words.zero_()


def foretold(model: Architecture, shape: Shape, machine: Machine, host: float, form: Form) -> float:
    """Return the predicted seconds of a step."""
    kernels = kernels_of(model, spans_of(shape), form)
    return host + sum(seconds_of(kernel, machine) for kernel in kernels)


class Steps:
    """Steps of one model, built as in the engine's loop."""

    def __init__(self, model: Architecture, dtype: torch.dtype, clock: Clock) -> None:
        self._rng = np.random.default_rng(0)
        network = loaded(
            model,
            random_weights(model, dtype, CPU),
            max_model_len=MAX_MODEL_LEN,
            backend=TouchedAttention,
        )
        self._vocabulary, self._clock = model.vocab_size, clock
        config = EngineConfig("none", max_num_seqs=512, max_num_batched_tokens=4096)
        room = KVCacheSize(NUM_PLACES // network.backend.page_size, MAX_MODEL_LEN)
        self.core: GenerationCore = make_core(network, room, config)

    def measure(self, shape: Shape) -> float:
        """Return the seconds of a step of a shape."""
        context = shape.context - RUNS // 2
        decodes = {self._add(context, MAX_MODEL_LEN) for _ in range(shape.decodes)}
        made = 0
        while made < shape.decodes:
            before = self.core.stats().output_tokens
            self.core.step()
            made = self.core.stats().output_tokens - before
        times = []
        for _ in range(RUNS):
            for _ in range(shape.prompts):
                self._add(shape.prompt, 1)
            started = self._clock()
            self.core.step()
            times.append(self._clock() - started)
        self.core.abort(decodes)
        return statistics.quantiles(times, n=10)[0]

    def _add(self, num_tokens: int, max_tokens: int) -> object:
        prompt = self._rng.integers(0, self._vocabulary, num_tokens).tolist()
        return self.core.add(SequenceRequest(prompt, max_tokens, GREEDY))


def quick(run: Callable[[], object], clock: Clock) -> float:
    """Return the first decile of a call's seconds."""
    run()
    times = []
    for _ in range(RUNS):
        started = clock()
        run()
        times.append(clock() - started)
    return statistics.quantiles(times, n=10)[0]


def table(
    model: Architecture, dtype: torch.dtype, clock: Clock, shapes: Sequence[Shape] = SHAPES
) -> Iterator[str]:
    """Yield the lines of a table as they become known."""
    found = ceilings(model, dtype, clock)
    machine = found.machine
    copy, flops = found.copy, machine["product"].flops
    plain = dict.fromkeys(machine, Limits(copy, flops, 0.0))
    yield f"A copy moves {copy / 1e9:.1f} GB/s."
    yield "| kernels | GB/s | GFLOP/s |\n|---|---:|---:|"
    for kind, limits in machine.items():
        yield f"| {kind} | {limits.bandwidth / 1e9:.1f} | {limits.flops / 1e9:.0f} |"
    yield ""
    yield "| step | measured, ms | foretold, ms | off by | by two ceilings alone, ms | off by |"
    yield "|---|" + "---:|" * 5
    form = Form(joins_gates=True, itemsize=dtype.itemsize)
    steps = Steps(model, dtype, clock)
    for shape in shapes:
        host = found.host(shape.decodes + shape.prompts)
        measured = steps.measure(shape)
        both = (foretold(model, shape, each, host, form) for each in (machine, plain))
        cells = " | ".join(f"{each * 1e3:.2f} | {each / measured - 1:+.0%}" for each in both)
        yield f"| {shape} | {measured * 1e3:.2f} | {cells} |"


def main() -> None:
    """Measure and predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="46m", help="use a known shape, or a model folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    model, dtype = architecture(arguments.model), getattr(torch, arguments.dtype)
    with torch.inference_mode():
        for line in table(model, dtype, clock):
            print(line, flush=True)


if __name__ == "__main__":
    main()
