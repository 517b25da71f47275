"""One decode step of a model by kernel: replayed from a graph, and launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from bench.gpu.parts.models import core_of, made, refuse
from bench.gpu.parts.profiles import profiled
from bench.gpu.parts.task import Numbers, Place, Task
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

MODELS = {"qwen3-0.6b": 8.0, "qwen3-8b": 18.0}  # and the usual seconds
SEQUENCES, PROMPT, PROFILED_STEPS, WARM_STEPS = 256, 512, 12, 4
# The prompt that starts last is computed within this many steps: it is shorter than a step may be.
PROMPT_STEPS = 3
GREEDY = Sampling(temperature=0)


def tasks(place: Place) -> Iterator[Task]:
    """Yield a step of each model from its graph, then the same without one."""
    models = {"tiny": 1.0} if place.is_tiny else MODELS
    for name, seconds in models.items():
        yield Task(f"{name}, captured", partial(step, place, name, has_graphs=True), seconds)
        yield Task(f"{name}, launched", partial(step, place, name, has_graphs=False), seconds)


def step(place: Place, name: str, *, has_graphs: bool) -> Numbers:
    """Profile steps in which all sequences decode and none ends."""
    found = made(name, place.device, is_tiny=place.is_tiny)
    count, length = (3, 5) if place.is_tiny else (SEQUENCES, PROMPT)
    steps, warm = (2, 1) if place.is_tiny else (PROFILED_STEPS, WARM_STEPS)
    config = replace(found.config, max_num_seqs=count) if not place.is_tiny else found.config
    if has_graphs:
        core, counted = core_of(found, config)
    else:
        core, counted = make_core(found.model, found.room, config, refuse), None
    fill(core, count, length, found.model.vocab_size, most=length + 4 * (steps + warm))
    for _ in range(warm):
        core.step()
    numbers = profiled(place, core.step, steps)
    return {
        "step_seconds": numbers["step_seconds"],
        "profile": numbers,
        "captures": 0 if counted is None else counted.captured,
        "captures_failed": 0 if counted is None else counted.failed,
    }


def fill(core: GenerationCore, count: int, length: int, vocabulary: int, most: int) -> None:
    """Start a number of sequences, and run until all of them decode."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        prompt = rng.integers(1, vocabulary, length).tolist()
        core.add(SequenceRequest(prompt, most, GREEDY))
    while core.stats().waiting:
        core.step()
    for _ in range(PROMPT_STEPS):
        core.step()
