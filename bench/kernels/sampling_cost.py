"""Sampling cost of a step, by our kernels and by the reference in torch.

    python -m bench.kernels.sampling_cost [--rows 256] [--vocabulary 152000] [--device cpu]

Logits are random in bf16, as those of a model with random weights: so flat that a nucleus of 0.9
holds most of a vocabulary. Figures are medians of a step's sampling, what the sampler gathers in
Python included; that part alone is told for 1,024 rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.engine.kernels import sampling as reference
from tidemill.engine.kernels.backends import choose_sampling
from tidemill.engine.kernels.sampling import Sampled
from tidemill.engine.loop.sampler import Sampler
from tidemill.engine.scheduling.sequence import Sampling, Sequence, SequenceRequest
from tidemill.engine.scheduling.table import SequenceTable

PROMPT, GENERATED = 165, 128
KINDS = {
    "greedy": Sampling(temperature=0),
    "greedy, repetition penalty": Sampling(temperature=0, repetition_penalty=1.05),
    "temperature": Sampling(temperature=0.7),
    "temperature, top-k 50": Sampling(temperature=0.7, top_k=50),
    "temperature, top-p 0.9": Sampling(temperature=0.7, top_p=0.9),
    "as file g": Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.05),
    "as Qwen2.5": Sampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
}


def filled(rows: int, vocabulary: int, sampling: Sampling) -> tuple[Sampler, np.ndarray]:
    """Return a sampler over a table of sequences, and their slots."""
    rng = np.random.default_rng(0)
    table = SequenceTable(rows, 1024, 16)
    for number in range(rows):
        sequence = Sequence(SequenceRequest(_ids(rng, vocabulary, PROMPT), 500, sampling), number)
        sequence.generated = _ids(rng, vocabulary, GENERATED)
        table.place(sequence, 0)
    return Sampler(table), np.arange(rows)


def _ids(rng: np.random.Generator, vocabulary: int, count: int) -> list[int]:
    ids: list[int] = rng.integers(0, vocabulary, count).tolist()
    return ids


def median(run: Callable[[], object], times: int) -> float:
    """Return milliseconds of a run, the first of all left out."""
    taken = []
    for _ in range(times + 1):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken[1:])


def choose(sampler: Sampler, slots: NDArray[np.int64], logits: torch.Tensor) -> Sampled:
    """Choose a token for each slot, from what they ask for on."""
    return sampler.sample(logits, sampler.metadata(slots, logits.shape[1]))


def main() -> None:
    """Measure every kind of row, then log-probabilities."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-reference", action="store_true", help="measure our kernels alone")
    asked = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(asked.rows, asked.vocabulary, generator=generator).bfloat16()
    logits = logits.to(asked.device)

    def show(name: str, own: Callable[[], object], in_torch: Callable[[], object]) -> None:
        kernels = median(own, asked.steps)
        torch_ms = "" if asked.no_reference else f"{median(in_torch, 1):,.0f}"
        print(f"| {name} | {kernels:.1f} | {torch_ms} |", flush=True)

    print("| rows | kernels, ms | torch, ms |\n|---|---:|---:|")
    with torch.inference_mode():
        for name, sampling in KINDS.items():
            sampler, slots = filled(asked.rows, asked.vocabulary, sampling)
            metadata = sampler.metadata(slots, asked.vocabulary)
            show(
                name,
                partial(choose, sampler, slots, logits),
                partial(reference.sample, logits, metadata),
            )
        rows, chosen = np.arange(asked.rows), torch.zeros_like(logits[:, 0], dtype=torch.int64)
        kernels = choose_sampling(logits.dtype, logits.device)
        show(
            "log-probabilities of 20",
            partial(kernels.compute_logprobs, logits, rows, chosen, 20),
            partial(reference.compute_logprobs, logits, rows, chosen, 20),
        )
    for name in ("greedy", "as file g"):
        sampler, slots = filled(1024, asked.vocabulary, KINDS[name])
        gathered = median(partial(sampler.metadata, slots, asked.vocabulary), 200)
        print(f"{name}: the rules of 1,024 rows are gathered in {gathered:.3f} ms")


if __name__ == "__main__":
    main()
