"""transformers on the same shapes and card: its continuous batching, and static batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from bench.gpu.mixes import Mix
from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.shapes import CONFIGS, architecture

# How many requests are given to either; few enough for the time that there is.
PEERS = (
    ("llama-3-8b", Mix(220, 200), 256, 128),
    ("llama-3-8b", Mix(1024, 128), 192, 64),
    ("llama-3-8b", Mix(128, 1024), 128, 128),
    ("qwen3-0.6b", Mix(220, 200), 256, 128),
)
TINY = (("tiny", Mix(5, 3), 2, 2),)


def tasks(place: Place) -> Iterator[Task]:
    """Yield both ways of each model and mix."""
    before = ""
    for name, mix, many, batch in TINY if place.is_tiny else PEERS:
        if name != before:
            made.cache_clear()
            gc.collect()
        before = name
        yield Task(f"static {name} {mix}", partial(static, place, name, mix, batch))
        yield Task(f"continuous {name} {mix}", partial(continuous, place, name, mix, many))


@cache
def made(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(**CONFIGS[name])
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def generation_config(mix: Mix) -> Any:
    """Return greedy generation of exactly so many tokens."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=mix.output, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def prompts(name: str, mix: Mix, count: int) -> list[list[int]]:
    """Return so many prompts."""
    rng = np.random.default_rng(0)
    found: list[list[int]] = rng.integers(
        1, architecture(name).vocab_size, (count, mix.prompt)
    ).tolist()
    return found


def static(place: Place, name: str, mix: Mix, batch: int) -> Numbers:
    """Time one batch of requests of one length, its best case."""
    model = made(name, place.device, place.dtype)
    ids = torch.tensor(prompts(name, mix, batch), device=place.device)
    config = generation_config(mix)
    with torch.inference_mode():
        model.generate(ids[:2], generation_config=generation_config(Mix(mix.prompt, 2)))
        place.wait()
        started = time.perf_counter()
        out = model.generate(ids, generation_config=config)
        place.wait()
    seconds = time.perf_counter() - started
    made_tokens = batch * (out.shape[1] - mix.prompt)
    return {
        "requests": batch,
        "outputs": made_tokens,
        "seconds": seconds,
        "outputs_per_second": made_tokens / seconds,
    }


def continuous(place: Place, name: str, mix: Mix, count: int) -> Numbers:
    """Time `generate_batch` from the first request to the last one's end: it warms up before."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Without bounds it takes most of a CPU's memory.
    few = {"num_blocks": 8, "page_size": 16, "max_batch_tokens": 32} if place.is_tiny else {}
    model = made(name, place.device, place.dtype)
    found = model.generate_batch(
        prompts(name, mix, count),
        generation_config=generation_config(mix),
        continuous_batching_config=ContinuousBatchingConfig(**few),
    ).values()
    if len(found) < count or any(one.error for one in found):
        raise RuntimeError(f"{len(found)} of {count} requests came back")
    ended = max(one.lifespan[1] for one in found)
    seconds = ended - min(one.created_time for one in found)
    outputs = sum(len(one.generated_tokens) for one in found)
    return {
        "requests": count,
        "outputs": outputs,
        "seconds": seconds,
        "outputs_per_second": outputs / seconds,
    }
