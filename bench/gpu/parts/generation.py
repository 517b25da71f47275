"""Tokens a second of the whole engine but its texts, as a share of the serial roofline.

Random weights of a shape, requests of one mix without end, and a window of seconds. As many run
from the start as fit, and have been at it for a while: their keys and values are noise that nobody
computed, as many as there would be (`bench.gpu.supply`). Then some steps in torch's profiler: how
long the device was busy, how long the host waited for it, and which kernels took how long.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple, cast

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from bench.gpu.cards import CARDS
from bench.gpu.mixes import MIXES, Mix
from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.random_models import loaded, random_weights
from bench.gpu.roofline import serial
from bench.gpu.shapes import architecture
from bench.gpu.simulator import Setting, forecast
from bench.gpu.supply import Supply
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels.attention import AttentionBackendType
from tidemill.engine.loop.assembly import make_core, measured_room
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.device import step_limits
from tidemill.engine.model.kv_cache_size import KVCacheSize
from tidemill.engine.model.loaded_model import LoadedModel

# Models, the share of the roofline that each is held to, and the seconds that are measured.
MODELS = {"llama-3-8b": 0.75, "qwen3-0.6b": 0.55}
WARM_SECONDS, WINDOW_SECONDS = 3.0, 9.0
PROFILED_STEPS, FEWEST_STEPS = 12, 4
TINY_MIX = Mix(12, 6, shared=16)
# What blocks the host until the device is through.
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")


def tasks(place: Place) -> Iterator[Task]:
    """Yield each model with each mix."""
    if place.is_tiny:
        yield Task(f"tiny {TINY_MIX}", partial(generate, place, "tiny", TINY_MIX, 0.0))
        return
    for name, goal in MODELS.items():
        made.cache_clear()  # who takes pages takes all that is free
        gc.collect()
        torch.cuda.empty_cache()
        for mix in MIXES:
            yield Task(f"{name} {mix}", partial(generate, place, name, mix, goal))


class Made(NamedTuple):
    """A model that is on the device, and the pages that it has."""

    model: LoadedModel
    room: KVCacheSize
    config: EngineConfig


@cache
def made(name: str, device: torch.device, *, is_tiny: bool) -> Made:
    """Return a model of random weights, with the pages that a run would have."""
    dtype = torch.float32 if is_tiny else torch.bfloat16
    shape = architecture(name)
    with torch.inference_mode():
        model = loaded(shape, random_weights(shape, dtype, device))
    model = replace(model, backend=with_noise(model.backend))
    if is_tiny:
        config = EngineConfig(name, max_num_seqs=4, max_num_batched_tokens=32)
        return Made(model, KVCacheSize(16, 64), config)
    config = EngineConfig(name)
    return Made(model, measured_room(model, config), config)


def with_noise(backend: AttentionBackendType) -> AttentionBackendType:
    """Return a backend whose pages hold numbers from the start: zeros would cost no power."""
    assert isinstance(backend, type)

    class Noisy(backend):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            for pages in (*self.keys, *self.values):
                pages.normal_()

    return cast("AttentionBackendType", Noisy)


def generate(place: Place, name: str, mix: Mix, goal: float) -> Numbers:
    """Measure one model with one mix."""
    model, room, config = made(name, place.device, is_tiny=place.is_tiny)
    shape, limits = architecture(name), step_limits(config, place.device)
    gc.collect()  # the pages of the mix before
    core = make_core(model, room, config)
    num_first = mix.at_once(room.num_pages * model.backend.page_size, limits.max_num_seqs)
    scheduler = core._scheduler  # noqa: SLF001 - whose steps are not all computed
    supply = Supply(mix, scheduler, core.add, num_first, model.vocab_size)
    num_filling = supply.fill()
    load = Load(core, supply)
    load.run_for(0.0 if place.is_tiny else WARM_SECONDS, place)  # kernels and graphs are made
    numbers = window(place, load)
    for key, of in (("of_h200s_roofline", CARDS["h200"]), ("of_roofline", place.card)):
        bound = serial(shape, of, mix).outputs_per_second
        numbers[key] = numbers["outputs_per_second"] / bound
    if not place.is_tiny:
        numbers.update(bound=goal, holds=numbers["of_roofline"] >= goal)
        numbers["memory_bytes"] = torch.cuda.max_memory_allocated(place.device)
        setting = Setting(shape, place.card, max_num_seqs=num_first)
        foretold = forecast(setting, mix, 512)
        numbers["foretold_outputs_per_second"] = foretold.outputs_per_second
        numbers["foretold_step_seconds"] = foretold.seconds / foretold.steps
        numbers["foretold_kernel_seconds"] = {
            kernel: seconds / foretold.steps for kernel, seconds in foretold.by_kernel.items()
        }
    numbers.update(
        num_pages=room.num_pages,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        sequences_at_first=num_first,
        steps_of_filling=num_filling,
        profile=profiled(place, load),
    )
    return numbers


@dataclass(frozen=True, slots=True)
class Load:
    """Work with somebody always waiting."""

    core: GenerationCore
    supply: Supply

    def step(self) -> None:
        """Run the next step."""
        self.supply.top_up()
        self.core.step()

    def run_for(self, seconds: float, place: Place) -> float:
        """Run steps for so long, and some at least; return how long it was."""
        started = time.perf_counter()
        for num_steps in count():
            took = time.perf_counter() - started
            if num_steps >= FEWEST_STEPS and took >= seconds:
                break
            self.step()
        place.wait()
        return time.perf_counter() - started


def window(place: Place, load: Load) -> Numbers:
    """Count what comes in some seconds."""
    before = load.core.stats()
    seconds = load.run_for(0.0 if place.is_tiny else WINDOW_SECONDS, place)
    after = load.core.stats()
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
