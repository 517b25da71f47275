"""Host time of a decoder layer's own kernels on a GPU, on a CPU: all but the driver's part.

    python -m bench.kernels.launch_cost [--rounds 5] [--calls 2000]

Calls what a dense layer of Qwen3-0.6B's shape launches for 64 decodes. First Triton's launches are
stubbed out, which leaves what our functions take; then one kernel is bound as for a launch (its
arguments specialised, the compiled kernel found), without the driver's call. Products are torch's
and not counted. Prints a markdown table of the best round's means.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from tidemill.engine.kernels.attention import AttentionShape, HeadNorms
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.step import Step
from tidemill.engine.kernels.triton import elementwise
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.kernels.triton.launch import compile_only

CPU = torch.device("cpu")
SHAPE = AttentionShape(16, 8, 128, 128, 1.0)
HIDDEN, INNER, DECODES = 1024, 3072, 64
ARCHITECTURE = 90
WARM_CALLS = 100

Calls = dict[str, tuple[int, Callable[[], object]]]  # by name: how often a layer does it


def layer_calls() -> Calls:
    """Return the calls of a layer over a prepared step of decodes."""
    dtype = torch.bfloat16
    backend = TritonAttention([SHAPE], DECODES, dtype, CPU)
    each, all_of_them = np.arange(DECODES), np.arange(DECODES + 1)
    same = dict.fromkeys(["positions", "token_ids", "context_lengths"], 0 * each)
    step = Step.pack(
        DECODES,
        CPU,
        **same,
        slots=each,
        query_starts=all_of_them,
        page_starts=all_of_them,
        pages=each,
        logit_rows=each[:0],
    )
    backend.prepare(step)
    heads = SHAPE.num_query_heads + 2 * SHAPE.num_kv_heads
    qkv = torch.empty(DECODES, heads * SHAPE.key_dim, dtype=dtype)
    cos_sin = torch.empty(DECODES, SHAPE.key_dim)
    head_weight = torch.empty(SHAPE.key_dim, dtype=dtype)
    norms = HeadNorms(head_weight, head_weight, 1e-6)
    query = torch.empty(DECODES, SHAPE.num_query_heads, SHAPE.key_dim, dtype=dtype)
    x, weight = torch.empty(DECODES, HIDDEN, dtype=dtype), torch.empty(HIDDEN, dtype=dtype)
    both, gate = torch.empty(DECODES, 2 * INNER, dtype=dtype), Gate()
    return {
        "norm + residual": (2, lambda: elementwise.add_rms_norm(x, x, weight, 1e-6)),
        "queries and keys": (1, lambda: backend.store_qkv(0, qkv, cos_sin, norms)),
        "attention": (1, lambda: backend.attend(0, query)),
        "gate": (1, lambda: elementwise.act_and_mul(both, gate)),
    }


def seconds_of(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Return what a call takes, the mean of the best round."""
    for _ in range(WARM_CALLS):
        call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return min(times)


def stub(*_: Any, **__: Any) -> None:
    """Stand in for a launch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each call and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.launch_cost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args(arguments)
    print("| call | a layer | µs a call |\n|---|---:|---:|")
    total, calls = 0.0, layer_calls()
    with torch.inference_mode(), patch.object(JITFunction, "run", stub):
        for name, (count, call) in calls.items():
            seconds = seconds_of(call, options.calls, options.rounds)
            total += count * seconds
            print(f"| {name} | {count} | {seconds * 1e6:.1f} |")
    print(f"| all, without Triton's launches | | {total * 1e6:.1f} |")
    with torch.inference_mode(), compile_only(ARCHITECTURE):
        _, call = calls["gate"]
        bound = seconds_of(call, options.calls, options.rounds)
    print(f"| gate, with its kernel bound | | {bound * 1e6:.1f} |")


if __name__ == "__main__":
    main()
