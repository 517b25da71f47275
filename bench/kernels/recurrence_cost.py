"""Recurrence cost of one layer on a CPU: decodes and a prefill chunk, beside the torch reference.

    python -m bench.kernels.recurrence_cost

bfloat16; medians in milliseconds. Of a decode stands beside it what reading and writing its states
takes at the rate of a copy of as many bytes in the same process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from tidemill.engine.kernels.cpu.recurrence import CpuRecurrence
from tidemill.engine.kernels.recurrence import (
    GatedDelta,
    RecurrentBackend,
    RecurrentShape,
    ReferenceRecurrence,
    RuleWeights,
    StateSpace,
)
from tidemill.engine.kernels.step import Step

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
RUNS = 9
RULES: Mapping[str, GatedDelta | StateSpace] = {
    "gated delta rule, 4 key and 8 value heads of 64": GatedDelta(4, 8, 64, 64),
    "Mamba-2, 16 heads of 64, state 64": StateSpace(16, 64, 1, 64),
}
# Sequences, and the tokens of each.
STEPS = [(192, 1), (8, 1), (1, 2048), (16, 128)]


def step_of(sequences: int, tokens: int) -> Step:
    """Return the step of sequences that go on in their rows."""
    total = sequences * tokens
    anything = np.zeros(total, np.int64)
    return Step.pack(
        sequences if tokens == 1 else 0,
        CPU,
        token_ids=anything,
        positions=anything,
        slots=anything,
        query_starts=np.arange(sequences + 1) * tokens,
        context_lengths=np.ones(sequences, np.int64),
        page_starts=np.arange(sequences + 1),
        pages=np.arange(sequences),
        logit_rows=np.arange(sequences),
        state_sources=np.arange(sequences),
        state_rows=np.arange(sequences),
    )


def layer(rule: GatedDelta | StateSpace, tokens: int) -> Callable[[RecurrentBackend], object]:
    """Return what runs convolution, rule and gated norm of one layer by a backend."""
    heads, channels = rule.state_shape[0], sum(rule.widths)
    x, gates = torch.randn(tokens, channels, dtype=DTYPE), torch.randn(tokens, heads, dtype=DTYPE)
    weights = RuleWeights(torch.zeros(heads), torch.zeros(heads), torch.ones(heads))
    taps = torch.randn(channels, 4, dtype=DTYPE)

    def run(backend: RecurrentBackend) -> object:
        mixed = backend.convolve(0, x, taps, None)
        if isinstance(rule, GatedDelta):
            out = backend.apply_delta_rule(0, mixed, gates, gates, weights)
        else:
            out = backend.scan(0, mixed, gates, weights)
        flat = out.flatten(1)
        norm = torch.ones(flat.shape[1] // heads)
        return backend.gate_and_norm(flat, flat, norm, heads, 1e-6, is_norm_first=True)

    return run


def milliseconds(call: Callable[[], object], runs: int = RUNS) -> float:
    """Return the median time of a call, after one that does not count."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def times_of(rule: GatedDelta | StateSpace, sequences: int, tokens: int) -> tuple[float, ...]:
    """Return the times of a layer: by the CPU's kernels, of copied states, by the reference."""
    shape = RecurrentShape(sum(rule.widths), 4, rule=rule)
    step, run = step_of(sequences, tokens), layer(rule, sequences * tokens)

    def by(backend: RecurrentBackend, runs: int) -> float:
        backend.prepare(step)
        return milliseconds(lambda: run(backend), runs)

    states = torch.randn(sequences, *rule.state_shape)
    copied = torch.empty_like(states)
    parts = ([shape], sequences, DTYPE, CPU)
    return (
        by(CpuRecurrence(*parts), RUNS),
        milliseconds(lambda: copied.copy_(states)),
        by(ReferenceRecurrence(*parts), 1),
    )


def main() -> None:
    """Print the table."""
    print("| rule | sequences x tokens | ms | states copied, ms | reference, ms |")
    print("|---|---|---:|---:|---:|")
    for name, rule in RULES.items():
        for sequences, tokens in STEPS:
            own, copied, reference = times_of(rule, sequences, tokens)
            size = f"{sequences} x {tokens}"
            print(f"| {name} | {size} | {own:.2f} | {copied:.2f} | {reference:.0f} |")


if __name__ == "__main__":
    main()
