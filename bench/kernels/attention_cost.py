"""Attention cost of one layer on a CPU: decodes, shared prefixes, and prefill chunks.

    python -m bench.kernels.attention_cost [--heads 8,4] [--width 64]

Decodes with private pages are compared with a copy of as many bytes in the same process; decodes
with shared first pages with the same sequences on private pages; chunks with torch's flash
attention of contiguous keys, one call per sequence. The dtype is bfloat16; figures are medians, in
milliseconds by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.cpu.attention import CpuAttention
from tidemill.engine.kernels.paged_step import Span, paged_step
from tidemill.engine.kernels.step import Step

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
RUNS = 15
OWN_TOKENS = 32
DECODES = [(1, 1000), (8, 1000), (256, 230), (192, 942)]
SHARED = [(count, tokens) for tokens in (128, 512, 1792) for count in (4, 16, 64, 192)]
CHUNKS = [(32, 0, 166), (16, 912, 45), (16, 1792, 30), (2, 0, 1800)]


@dataclass(frozen=True, slots=True)
class Sequences:
    """A number of sequences, each computing `tokens` after a context.

    `shared` tokens of the context are in pages that all have in common.
    """

    count: int
    context: int
    tokens: int
    shared: int = 0

    def step(self) -> tuple[Step, int]:
        """Return the step that computes them, and its number of pages."""
        size = CpuAttention.page_size
        length = self.context + self.tokens
        per_sequence, common = -(-length // size), self.shared // size
        pages = np.arange(self.count * per_sequence).reshape(self.count, per_sequence)
        # In random order, as after some time.
        pages = np.random.default_rng(0).permutation(pages.size)[pages]
        pages[:, :common] = pages[0, :common]
        spans = [Span(self.context, length, own) for own in pages]
        step = paged_step(spans, size, CPU, logit_rows=np.zeros(0, np.int64))
        return step, pages.size


def attending(shape: AttentionShape, sequences: Sequences) -> Callable[[], object]:
    """Return a function that prepares the step and attends one layer."""
    step, num_pages = sequences.step()
    backend = CpuAttention([shape], num_pages, DTYPE, CPU)
    for words in (backend.keys[0], backend.values[0]):
        words.normal_()
    query = torch.randn(step.num_tokens, shape.num_query_heads, shape.key_dim).to(DTYPE)

    def run() -> None:
        backend.prepare(step)
        backend.attend(0, query)

    return run


def flash(shape: AttentionShape, sequences: Sequences) -> Callable[[], object]:
    """Return torch's own attention for the same sequences, with contiguous keys."""
    length = sequences.context + sequences.tokens
    query = torch.randn(1, shape.num_query_heads, sequences.tokens, shape.key_dim).to(DTYPE)
    key, value = torch.randn(2, 1, shape.num_kv_heads, length, shape.key_dim).to(DTYPE)
    mask = torch.ones(sequences.tokens, length).tril(sequences.context).bool()
    is_causal = not sequences.context

    def run() -> None:
        for _ in range(sequences.count):
            functional.scaled_dot_product_attention(
                *(query, key, value, None if is_causal else mask),
                is_causal=is_causal,
                enable_gqa=True,
            )

    return run


def median(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a call."""
    run()
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def copying(num_bytes: int) -> Callable[[], object]:
    """Return a copy that reads and writes a total of `num_bytes`."""
    source = torch.ones(num_bytes // 8, dtype=torch.int32)
    target: Tensor = torch.empty_like(source)
    return lambda: target.copy_(source)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="8,4", help="set the query and key heads (%(default)s)")
    parser.add_argument(
        "--width", type=int, default=64, help="set the width of a head (%(default)s)"
    )
    arguments = parser.parse_args()
    heads, kv_heads = map(int, arguments.heads.split(","))
    width = arguments.width
    shape = AttentionShape(heads, kv_heads, width, width, width**-0.5)
    token_bytes = 2 * kv_heads * width * DTYPE.itemsize

    print("| decodes | ms | GB/s | of a copy's |\n|---|---:|---:|---:|")
    for count, context in DECODES:
        num_bytes = count * context * token_bytes
        own = median(attending(shape, Sequences(count, context - 1, 1)))
        copied = median(copying(num_bytes))
        speed = num_bytes / own / 1e6
        print(f"| {count} × {context} | {own:.2f} | {speed:.0f} | {copied / own:.0%} |")

    print("\n| decodes × shared tokens | shared | own pages | ratio |\n|---|---:|---:|---:|")
    for count, tokens in SHARED:
        context = tokens + OWN_TOKENS
        shared = median(attending(shape, Sequences(count, context, 1, tokens)))
        own = median(attending(shape, Sequences(count, context, 1)))
        print(f"| {count} × {tokens} | {shared:.2f} | {own:.2f} | {own / shared:.2f} |")

    print("\n| chunks | ms | torch's flash | ratio |\n|---|---:|---:|---:|")
    for count, context, tokens in CHUNKS:
        sequences = Sequences(count, context, tokens)
        own, theirs = median(attending(shape, sequences)), median(flash(shape, sequences))
        name = f"{count} × {tokens} after {context}"
        print(f"| {name} | {own:.2f} | {theirs:.2f} | {theirs / own:.2f} |")


if __name__ == "__main__":
    main()
