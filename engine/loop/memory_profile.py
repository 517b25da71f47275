"""Memory profile: runs the largest possible steps once, to size the KV cache.

The remaining memory can hold keys and values. An analytical bound would have to cover the temporary
memory of functions on every device, and would leave gigabytes unused.
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

# Every sampling feature that a request may use.
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

# Calls a function and returns its peak memory in bytes.
PeakOf = Callable[[Callable[[], None]], int]


def peak_memory_on(device: torch.device) -> PeakOf | None:
    """Return a function that measures peak memory; None if the engine shares the memory."""
    if device.type != "cuda":
        return None

    def peak_of(call: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        gc.collect()  # free the trial's objects before the memory is counted
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
    """Return the memory of the largest steps besides weights and pages; None if they do not fit.

    One step has the maximum number of tokens and rows, another the maximum of a graph.
    """
    page_size = model.backend.page_size
    sizes = {limits.max_num_batched_tokens}
    sizes.add(min(max_graph_tokens(model), limits.max_num_batched_tokens))
    trials = [_requests(limits.max_num_seqs, size, model) for size in sorted(sizes)]
    # The last page of each sequence may hold one token; new sequences need pages too.
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
        logger.warning("the largest step does not fit into memory: steps will be smaller")
        return None
    return max(most - num_pages * model.page_bytes, 0)


def _requests(most: int, num_tokens: int, model: LoadedModel) -> list[SequenceRequest]:
    """Return requests whose prompts fill one step of `num_tokens`, with `most` sampled rows."""
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
