"""Cost of linear layers by our kernel and by oneDNN, shape by shape.

    python -m bench.kernels.product_cost [--models 46m,470m] [--dtype bfloat16] [--rows 1,8,256]
        [--threads 2]

A shape has as many weights as do not fit a cache together, each multiplied once a run. Both ways
take turns, after a rest in which the threads of the other went to sleep. Figures are those that
one product in ten stays below: what others do on the machine is in the rest. A sum over the same
bytes, which torch has vectorised, stands for the memory's own speed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tidemill.engine.kernels.cpu.linear import prepare
from tidemill.engine.kernels.linear import Linear, PrepareLinear, prepack

# Outputs and inputs of what a layer multiplies by, and of the head.
SHAPES = {
    "46m": [(1024, 512), (512, 512), (3072, 512), (512, 1536), (16384, 512)],
    "470m": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (32768, 1024)],
}
ROWS = "1,4,8,32,192,256,2048"
COLD_BYTES = 96_000_000
NUM_RUNS = 7
REST_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class ProductCost:
    """Seconds of one product in both ways, and of a sum over its weights."""

    outputs: int
    inputs: int
    rows: int
    num_bytes: int
    own: float
    onednn: float
    by_sum: float


def measure(
    outputs: int, inputs: int, rows: Sequence[int], dtype: torch.dtype
) -> list[ProductCost]:
    """Return what products of one shape cost with so many rows."""
    num_bytes = outputs * inputs * dtype.itemsize
    weights = torch.randn(COLD_BYTES // num_bytes + 1, outputs, inputs).to(dtype)
    words = weights.view(torch.float32)
    (by_sum,) = _quick([[partial(torch.sum, part) for part in words]])
    ways = [_prepared(way, weights) for way in (prepare, prepack)]
    costs = []
    for count in rows:
        x = torch.randn(count, inputs).to(dtype)
        own, onednn = _quick([[partial(product, x) for product in products] for products in ways])
        costs.append(ProductCost(outputs, inputs, count, num_bytes, own, onednn, by_sum))
    return costs


def _prepared(way: PrepareLinear, weights: Tensor) -> list[Linear]:
    made = [way(weight, None, None) for weight in weights]
    return [product for product in made if product is not None]


def _quick(ways: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
    """Return the seconds below which one call in ten of each way stays."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(NUM_RUNS):
        for way, own in zip(ways, times, strict=True):
            time.sleep(REST_SECONDS)
            for call in way:
                started = time.perf_counter()
                call()
                own.append(time.perf_counter() - started)
    return [statistics.quantiles(own, n=10)[0] for own in times]


def show(costs: Sequence[ProductCost]) -> None:
    """Print the table."""
    print(
        "| outputs × inputs | rows | ours, µs | oneDNN, µs | ours, GFLOP/s | oneDNN, GFLOP/s "
        "| ours, GB/s | oneDNN, GB/s | a sum, GB/s |"
    )
    print("|---:" * 9 + "|")
    for cost in costs:
        flops = 2 * cost.rows * cost.outputs * cost.inputs
        both = (cost.own, cost.onednn)
        cells = [f"{seconds * 1e6:.0f}" for seconds in both]
        cells += [f"{flops / seconds / 1e9:.0f}" for seconds in both]
        cells += [f"{cost.num_bytes / seconds / 1e9:.1f}" for seconds in (*both, cost.by_sum)]
        print(f"| {cost.outputs} × {cost.inputs} | {cost.rows} | {' | '.join(cells)} |")


def main() -> None:
    """Measure the shapes of some models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES), help="comma-separated (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", default=ROWS, help="comma-separated (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)  # and so many has our team, which starts later
    rows = [int(count) for count in arguments.rows.split(",")]
    dtype = getattr(torch, arguments.dtype)
    shapes = [shape for model in arguments.models.split(",") for shape in SHAPES[model]]
    show([cost for shape in shapes for cost in measure(*shape, rows, dtype)])


if __name__ == "__main__":
    main()
