"""Tokens a second of the whole engine but its texts, as a share of the serial roofline.

Random weights of a shape, requests of one mix without end, and a window of seconds once as many run
as fit: those that start first have been at it for a while, so that the mixture is the lasting one
(`bench.simulator.Supply`). Then some steps under torch's profiler: how long the device was busy,
how long the host waited for it, and which kernels took how long.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from bench.cards import CARDS
from bench.gpu_parts.task import Numbers, Place, Task
from bench.random_models import loaded, random_weights
from bench.roofline import MIXES, Mix, serial
from bench.shapes import architecture
from bench.simulator import Setting, forecast
from engine.config import EngineConfig
from engine.kinds.generation import make_work, measured_room
from engine.model.memory import Room
from engine.model.network import LoadedModel
from engine.model.placement import step_limits
from engine.scheduling.sequence import Sampling, SequenceRequest
from engine.stepping.generation import GenerationWork

# Models, the share of the roofline that each is held to, and the seconds that are measured.
MODELS = {"llama-3-8b": 0.75, "qwen3-0.6b": 0.55}
WINDOW_SECONDS = 12.0
PROFILED_STEPS = 12
NUM_WAITING = 64
GREEDY = Sampling(temperature=0)
TINY_MIX = Mix(12, 6, shared=16)
# What blocks the host until the device is through.
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")


def tasks(place: Place) -> Iterator[Task]:
    """Yield each model with each mix."""
    if place.is_tiny:
        yield Task(f"tiny {TINY_MIX}", partial(generate, place, "tiny", TINY_MIX, 0.0))
        return
    for name, goal in MODELS.items():
        made.cache_clear()  # what takes pages takes all that is free
        gc.collect()
        torch.cuda.empty_cache()
        for mix in MIXES:
            yield Task(f"{name} {mix}", partial(generate, place, name, mix, goal))


class Made(NamedTuple):
    """A model that is on the device, and the pages that it has."""

    model: LoadedModel
    room: Room
    config: EngineConfig


@cache
def made(name: str, device: torch.device, *, is_tiny: bool) -> Made:
    """Return a model of random weights."""
    dtype = torch.float32 if is_tiny else torch.bfloat16
    shape = architecture(name)
    with torch.inference_mode():
        model = loaded(shape, random_weights(shape, dtype, device), max_model_len=2048)
    config = EngineConfig(name)
    if is_tiny:
        config = EngineConfig(name, max_num_seqs=4, max_num_batched_tokens=32)
        return Made(model, Room(16, 64), config)
    return Made(model, measured_room(model, config), config)


class Load:
    """Requests of one mix without end."""

    def __init__(self, work: GenerationWork, mix: Mix, vocabulary: int, num_first: int) -> None:
        self.work, self._mix, self._vocabulary = work, mix, vocabulary
        self._rng = np.random.default_rng(0)
        self._beginning = self._ids(mix.shared)
        for _ in range(num_first):
            self._add(int(self._rng.integers(0, mix.output)))

    def step(self) -> None:
        """Run the next step; somebody always waits."""
        while self.work.stats().waiting < NUM_WAITING:
            self._add(0)
        self.work.step()

    def _add(self, done: int) -> None:
        prompt = [*self._beginning, *self._ids(self._mix.prompt + done)]
        self.work.add(SequenceRequest(prompt, self._mix.output - done, GREEDY))

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._vocabulary, count).tolist()
        return ids


def generate(place: Place, name: str, mix: Mix, goal: float) -> Numbers:
    """Measure one model with one mix."""
    model, room, config = made(name, place.device, is_tiny=place.is_tiny)
    shape = architecture(name)
    work = make_work(model, room, config)
    places = room.num_pages * model.backend.page_size
    limits = step_limits(config, model.device)
    num_first = min(limits.max_num_seqs, int((places - mix.shared) / (mix.prompt + mix.output / 2)))
    load = Load(work, mix, model.vocab_size, num_first)
    steps_before = fill(load, num_first)
    numbers = window(place, load)
    card = place.card
    for key, of in (("of_h200s_roofline", CARDS["h200"]), ("of_roofline", card)):
        bound = serial(shape, of, mix).outputs_per_second
        numbers[key] = numbers["outputs_per_second"] / bound
    numbers["roofline"] = serial(shape, card, mix).outputs_per_second
    numbers.update(bound=goal, holds=numbers["of_roofline"] >= goal, pages=room.num_pages)
    numbers.update(steps_until_full=steps_before, first_sequences=num_first)
    if not place.is_tiny:
        numbers["memory_bytes"] = torch.cuda.max_memory_allocated(place.device)
        tokens = limits.max_num_batched_tokens
        setting = Setting(shape, card, max_num_seqs=num_first, max_num_batched_tokens=tokens)
        foretold = forecast(setting, mix, 512)
        numbers["foretold_outputs_per_second"] = foretold.outputs_per_second
        numbers["foretold_step_seconds"] = foretold.seconds / foretold.steps
    numbers["profile"] = profiled(place, load)
    return numbers


def fill(load: Load, num_first: int) -> int:
    """Run steps until so many sequences have begun to answer; return how many it took."""
    for steps in count():
        stats = load.work.stats()
        is_full = stats.running >= 0.95 * num_first or stats.preemptions
        if is_full or stats.output_tokens > num_first:
            return steps
        load.step()
    raise AssertionError


def window(place: Place, load: Load) -> Numbers:
    """Count what comes in some seconds."""
    place.wait()
    before, started = load.work.stats(), time.perf_counter()
    seconds = 0.0
    while seconds < (0.0 if place.is_tiny else WINDOW_SECONDS):
        load.step()
        seconds = time.perf_counter() - started
    if place.is_tiny:
        for _ in range(4):
            load.step()
        seconds = time.perf_counter() - started
    after = load.work.stats()
    steps = after.steps - before.steps
    return {
        "outputs_per_second": (after.output_tokens - before.output_tokens) / seconds,
        "prompts_per_second": (after.prompt_tokens - before.prompt_tokens) / seconds,
        "step_seconds": seconds / steps,
        "steps": steps,
        "running": after.running,
        "preemptions": after.preemptions - before.preemptions,
        "seconds": seconds,
    }


def profiled(place: Place, load: Load) -> Numbers:
    """Return where the time of some steps goes: the device busy, the host waiting, each kernel."""
    steps = 2 if place.is_tiny else PROFILED_STEPS
    activities = [ProfilerActivity.CPU]
    if place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    place.wait()
    with profile(activities=activities, acc_events=True) as trace:
        started = time.perf_counter()
        for _ in range(steps):
            load.step()
        seconds = time.perf_counter() - started
        place.wait()
    on_device: dict[str, float] = defaultdict(float)
    spans, waited = [], 0.0
    for event in trace.events():
        span = event.time_range
        if event.device_type == DeviceType.CUDA:
            spans.append((span.start, span.end))
            on_device[event.name[:80]] += (span.end - span.start) / 1e6 / steps
        elif event.name in WAITS:
            waited += (span.end - span.start) / 1e6
    longest = sorted(on_device.items(), key=lambda item: -item[1])[:25]
    return {
        "step_seconds": seconds / steps,
        "device_busy": covered(spans) / 1e6 / seconds,
        "host_waits": waited / seconds,
        "kernels_a_step": len(spans) / steps,
        "kernel_seconds_a_step": dict(longest),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of some spans lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
