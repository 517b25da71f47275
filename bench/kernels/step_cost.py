"""Cost of one step of few sequences, compared with reading the weights once, and its parts.

    python -m bench.kernels.step_cost --model out/bench/46m [--dtype bfloat16] [--sequences 1,2,4,8]
        [--contexts 32,1024]

*Reading* is measured twice, from a copy of the weight matrices in the same process, just before the
steps: the time of a plain sum over their bytes, and that of a product with one row by torch's
`linear` for each matrix. A step is timed as the loop runs it, sampling included, in pure decode.
Figures are first deciles, because other work on the machine is in the rest. The parts are those of
the fastest of as many steps again under Python's profiler, which slows Python.
Use Python 3.11: 3.13's profiler does not report numba's functions, whose time counts as Python's.
"""

from __future__ import annotations

import argparse
import cProfile
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tidemill.engine.config import EngineConfig
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.loading import load_model
from tidemill.engine.model.network.kv_cache_size import compute_kv_cache_size
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

NUM_STEPS = 40
# No sequence ends while its steps are measured.
MAX_TOKENS = 1000
# Names of torch's functions, as the profiler writes them.
PRODUCTS = re.compile(r"\b(linear|matmul|mm|bmm)\b|_ops\.mkldnn|cpu/linear\.py")
ATTENTION = re.compile(r"scaled_dot_product|cpu/(attention|qkv|tile_plan|tiles)\.py")
TORCH = re.compile(r"torch|Tensor")


class Reading(NamedTuple):
    """Milliseconds of reading all weight matrices once: by a sum, and by products with a row."""

    by_sum: float
    by_product: float


class Parts(NamedTuple):
    """Milliseconds of a step by category, and the number of calls of torch and numba."""

    products: float
    attention: float
    other_kernels: float
    python: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of a step of some sequences, and the figures to compare it with."""

    num_sequences: int
    context: int
    milliseconds: float
    reading: Reading
    parts: Parts


class WeightReader:
    """The weight matrices of a checkpoint in one dtype, end to end, to be read once a call."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        tensors = [
            tensor
            for path in sorted(folder.glob("*.safetensors"))
            for tensor in load_file(path).values()
            if tensor.ndim == 2
        ]
        self._flat = torch.cat([tensor.to(dtype).flatten() for tensor in tensors])
        parts = torch.split(self._flat, [tensor.numel() for tensor in tensors])
        self._matrices = [
            part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
        ]
        self._rows = [torch.ones(1, matrix.shape[1], dtype=dtype) for matrix in self._matrices]
        self.num_bytes = self._flat.numel() * dtype.itemsize

    def measure(self) -> Reading:
        """Return the figures of both ways of reading."""
        return Reading(_quick(self._words.sum), _quick(self._multiply))

    @property
    def _words(self) -> Tensor:
        """Return the same bytes as fp32, whose sum torch has vectorised."""
        return self._flat.view(torch.float32)

    def _multiply(self) -> None:
        for row, matrix in zip(self._rows, self._matrices, strict=True):
            torch.nn.functional.linear(row, matrix)


def measure(
    core: GenerationCore, reader: WeightReader, vocab_size: int, num_sequences: int, context: int
) -> StepCost:
    """Run sequences of separate prompts until all decode, then time and profile their steps."""
    rng = np.random.default_rng(num_sequences * context)
    sequences = {
        core.add(
            SequenceRequest(
                rng.integers(0, vocab_size, context).tolist(), MAX_TOKENS, Sampling(temperature=0)
            )
        )
        for _ in range(num_sequences)
    }
    made = 0
    while made != num_sequences:
        before = core.stats().output_tokens
        core.step()
        made = core.stats().output_tokens - before
    for _ in range(NUM_STEPS // 2):
        core.step()
    reading = reader.measure()
    milliseconds = _quick(core.step)
    parts = min((profiled(core) for _ in range(NUM_STEPS)), key=lambda parts: sum(parts[:-1]))
    core.abort(sequences)
    return StepCost(num_sequences, context, milliseconds, reading, parts)


def profiled(core: GenerationCore) -> Parts:
    """Run one step under the profiler and return its time by category."""
    profile = cProfile.Profile()
    profile.runcall(core.step)
    compiled = compiled_functions()
    times, num_calls = dict.fromkeys(Parts._fields[:-1], 0.0), 0
    for entry in profile.getstats():
        code, name = entry.code, str(entry.code)
        is_compiled = code in compiled
        if not (is_compiled or (isinstance(code, str) and TORCH.search(name))):
            part = "python"
        else:
            num_calls += entry.callcount
            part = "other_kernels"
            if PRODUCTS.search(name):
                part = "products"
            elif ATTENTION.search(name):
                part = "attention"
        times[part] += entry.inlinetime * 1e3
    return Parts(**times, num_calls=num_calls)


def compiled_functions() -> set[CodeType]:
    """Return the code of every function that numba compiled, as the profiler identifies it."""
    return {
        value.py_func.__code__
        for name, module in list(sys.modules.items())
        if name.startswith("tidemill.engine.kernels")
        for value in vars(module).values()
        if hasattr(value, "py_func")
    }


def _quick(run: Callable[[], object]) -> float:
    """Return the first decile in milliseconds, to exclude other programs on the machine."""
    times = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.quantiles(times, n=10)[0]


def show(costs: list[StepCost]) -> None:
    """Print the table."""
    print(
        "| sequences | context | step, ms | × a sum | × products | profiled: products | attention "
        "| other kernels | Python | calls |"
    )
    print("|---:" * 10 + "|")
    for cost in costs:
        reading, parts = cost.reading, cost.parts
        ratios = (cost.milliseconds / each for each in reading)
        times = " | ".join(f"{each:.1f}" for each in parts[:-1])
        print(
            f"| {cost.num_sequences} | {cost.context} | {cost.milliseconds:.1f} | "
            + " | ".join(f"{each:.1f}" for each in ratios)
            + f" | {times} | {parts.num_calls} |"
        )


def main() -> None:
    """Measure one model in each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="use this model folder")
    parser.add_argument(
        "--dtype",
        default="bfloat16,float32",
        help="measure these dtypes, comma-separated (%(default)s)",
    )
    parser.add_argument("--sequences", default="1,2,4,8,64,256")
    parser.add_argument("--contexts", default="32,1024")
    arguments = parser.parse_args()
    for dtype in arguments.dtype.split(","):
        contexts = list(map(int, arguments.contexts.split(",")))
        longest = max(contexts) + MAX_TOKENS
        config = EngineConfig(str(arguments.model), dtype=dtype, max_model_len=longest)
        model = load_model(config)
        core = make_core(model, compute_kv_cache_size(model, config), config)
        reader = WeightReader(arguments.model, model.dtype)
        costs = [
            measure(core, reader, model.vocab_size, num_sequences, context)
            for context in contexts
            for num_sequences in map(int, arguments.sequences.split(","))
        ]
        by_sum, by_product = (
            statistics.median(times)
            for times in zip(*(cost.reading for cost in costs), strict=True)
        )
        print(
            f"{dtype}: {reader.num_bytes / 1e6:.0f} MB of matrices are summed in {by_sum:.1f} ms, "
            f"multiplied with one row in {by_product:.1f} ms."
        )
        show(costs)


if __name__ == "__main__":
    main()
