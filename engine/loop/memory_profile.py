"""Memory profile: runs the largest possible steps once, to size the KV cache.

What is left beside them may be keys and values. A sum of widths would have to bound what functions
of any device take on their way, and would leave a card's gigabytes unused.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from ..model.config.device import StepLimits
from ..model.network.kv_cache_size import KVCacheSize
from ..model.network.loaded_model import LoadedModel
from ..scheduling.sequence import Sampling, SequenceRequest
from ..scheduling.step_budget import MAX_SCORED_ROWS
from .cuda_graphs import max_graph_tokens
from .generation import GenerationCore

logger = logging.getLogger(__name__)

# Everything that a request may ask of a row of logits.
SAMPLING = Sampling(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    logprobs=20,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
)

# Calls something and returns the most memory that it held at a time, in bytes.
PeakOf = Callable[[Callable[[], None]], int]


def peak_memory_on(device: torch.device) -> PeakOf | None:
    """Return what measures on a device; None where memory is not the engine's alone."""
    if device.type != "cuda":
        return None

    def peak_of(call: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        gc.collect()  # what a trial made is gone before the rest is counted
        torch.cuda.synchronize(device)
        most = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        return most - before

    return peak_of


def step_bytes(
    model: LoadedModel,
    limits: StepLimits,
    make_core: Callable[[KVCacheSize], GenerationCore],
    peak_of: PeakOf,
) -> int | None:
    """Return what the largest steps take beside weights and pages; None where they do not fit.

    One step is of as many tokens and rows as there may be, another of as many as a graph may hold.
    """
    page_size = model.backend.page_size
    sizes = {limits.max_num_batched_tokens}
    sizes.add(min(max_graph_tokens(model), limits.max_num_batched_tokens))
    trials = [_requests(limits.max_num_seqs, size, model) for size in sorted(sizes)]
    # The last page of each sequence may hold one token; some must be left for those that start.
    in_pages = [-(-count // page_size) for count in (limits.max_num_seqs, max(sizes))]
    num_pages = limits.max_num_seqs + sum(in_pages)
    num_steps = []

    def run() -> None:
        try:
            core = make_core(KVCacheSize(num_pages, model.max_model_len))
        except torch.OutOfMemoryError:
            return
        for requests in trials:
            for request in requests:
                core.add(request)
            while core.step() is not None:
                pass
        num_steps.append(core.stats().steps)

    most = peak_of(run)
    if num_steps != [len(trials)]:
        logger.warning("the largest step does not fit into memory: smaller ones will be made")
        return None
    return max(most - num_pages * model.page_bytes, 0)


def _requests(most: int, num_tokens: int, model: LoadedModel) -> list[SequenceRequest]:
    """Return requests whose prompts are one step of so many tokens, and sample as many rows."""
    longest = model.max_model_len
    lengths = [1] * min(most, num_tokens)
    left = num_tokens - len(lengths)
    scored = min(MAX_SCORED_ROWS, longest, left + 1) if len(lengths) > 1 else 0
    if scored:
        lengths[0], left = scored, left - scored + 1
    for place in range(1 if scored else 0, len(lengths)):
        lengths[place] += min(left, longest - 1)
        left -= lengths[place] - 1
    return [
        SequenceRequest(
            [(number + place) % model.vocab_size for place in range(length)],
            1,
            replace(SAMPLING, seed=number),
            prompt_logprobs=20 if scored and not number else None,
            cache_salt=f"of {num_tokens} tokens",
        )
        for number, length in enumerate(lengths)
    ]
