"""Speed of linear layers on a CPU: our kernel, oneDNN with prepacked weights, and torch.

    OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python -m bench.kernels.linear_cost [--dtype float32]

Figures are GFLOP/s of the fastest of several runs, which take turns.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tidemill.engine.kernels.cpu import linear
from tidemill.engine.kernels.linear import prepack

SHAPES = [(512, 512), (1536, 512), (512, 1536), (2048, 576), (16_384, 512)]
ROWS = [1, 4, 8, 16, 32, 64, 256]
RUNS = 5
RUN_FLOP = 1e8


def rates(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype, runs: int = RUNS
) -> dict[str, float]:
    """Return GFLOP/s by library; 0 where a library has no kernel."""
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    layers: dict[str, Callable[[Tensor], Tensor] | None] = {
        "ours": linear.prepare(weight, None, None),
        "oneDNN": prepack(weight, None, None),
        "torch": partial(functional.linear, weight=weight),
    }
    flop = 2 * outputs * inputs * rows
    seconds = dict.fromkeys(layers, math.inf)
    for _ in range(runs):
        for name, layer in layers.items():
            if layer is not None:
                seconds[name] = min(_seconds(layer, x, flop), seconds[name])
    return {name: flop / taken / 1e9 for name, taken in seconds.items()}


def _seconds(layer: Callable[[Tensor], Tensor], x: Tensor, flop: int) -> float:
    """Return the seconds of one call."""
    calls = max(1, round(RUN_FLOP / flop))
    started = time.perf_counter()
    for _ in range(calls):
        layer(x)
    return (time.perf_counter() - started) / calls


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    dtype = getattr(torch, parser.parse_args().dtype)
    print("| outputs × inputs | rows | ours | oneDNN | torch |\n|---|---:|---:|---:|---:|")
    for outputs, inputs in SHAPES:
        for rows in ROWS:
            cells = (f"{rate:.0f}" for rate in rates(outputs, inputs, rows, dtype).values())
            print(f"| {outputs} × {inputs} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
