"""Tokens per second of the whole engine except its texts, against published figures and roofline.

Random weights of a shape, requests of one mix without end, and a window of seconds. As many run
from the start as fit, in the middle of their outputs: their keys and values are noise with the
right length (`bench.gpu.supply`). Then some steps run in torch's profiler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from bench.gpu.anchors import ANCHORS, DATATROVE, MLPERF
from bench.gpu.mixes import Mix
from bench.gpu.parts.models import core_of, made
from bench.gpu.parts.profiles import profiled
from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.roofline import serial
from bench.gpu.shapes import architecture
from bench.gpu.supply import Supply
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.config.device import step_limits

SHORT, LONG = Mix(220, 200), Mix(1024, 128)
# Model, whether its products are in fp8, and its mixes; those with an anchor come first.
WORK = (
    ("qwen3-8b", False, (DATATROVE,)),
    ("qwen3-0.6b", False, (DATATROVE, SHORT)),
    ("qwen3-30b-a3b", False, (DATATROVE, SHORT)),
    ("llama-3-8b", True, (MLPERF,)),
    ("llama-3-8b", False, (SHORT, LONG)),
)
# Usual seconds: those of a mix, and those of creating a model.
SECONDS, MODEL_SECONDS = 17.0, 8.0
WARM_SECONDS, WINDOW_SECONDS = 3.0, 8.0
PROFILED_STEPS, FEWEST_STEPS = 12, 4
TINY_MIX = Mix(12, 6, shared=16)


def tasks(place: Place) -> Iterator[Task]:
    """Yield each model with each mix."""
    work = (("tiny", False, (TINY_MIX,)),) if place.is_tiny else WORK
    for name, is_fp8, mixes in work:
        seconds = SECONDS + MODEL_SECONDS
        for mix in mixes:
            called = f"{name}{', fp8' if is_fp8 else ''} {mix}"
            yield Task(called, partial(generate, place, name, mix, is_fp8=is_fp8), seconds)
            seconds = SECONDS


def generate(place: Place, name: str, mix: Mix, *, is_fp8: bool) -> Numbers:
    """Measure one model with one mix."""
    found = made(name, place.device, is_fp8=is_fp8, is_tiny=place.is_tiny)
    model, room, config = found
    shape, limits = architecture(name), step_limits(config, place.device)
    core, counted = core_of(found, config)
    num_first = mix.at_once(room.num_pages * model.backend.page_size, limits.max_num_seqs)
    scheduler = core._scheduler  # noqa: SLF001 - not all of its steps are computed
    supply = Supply(mix, scheduler, core.add, num_first, model.vocab_size)
    num_filling = supply.fill()
    load = Load(core, supply)
    load.run_for(0.0 if place.is_tiny else WARM_SECONDS, place)  # compiles kernels and graphs
    warm = 0 if counted is None else counted.captured
    numbers = window(place, load)
    if not is_fp8:  # it has another ceiling
        bound = serial(shape, place.card, mix).outputs_per_second
        numbers["of_roofline"] = numbers["outputs_per_second"] / bound
    if anchor := ANCHORS.get((name, is_fp8, mix)):
        numbers["of_anchor"] = numbers["outputs_per_second"] / anchor.published
        numbers["bound"] = anchor.expected
        numbers["holds"] = numbers["of_anchor"] >= anchor.expected
    if counted is not None:
        numbers["captures"], numbers["captures_failed"] = counted.captured, counted.failed
        numbers["captures_in_window"] = counted.captured - warm
        numbers["reserved_bytes"] = torch.cuda.memory_reserved(place.device)
        numbers["allocated_bytes"] = torch.cuda.max_memory_allocated(place.device)
    numbers.update(
        num_pages=room.num_pages,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        sequences_at_first=num_first,
        steps_of_filling=num_filling,
        profile=profiled(place, load.step, 2 if place.is_tiny else PROFILED_STEPS),
    )
    return numbers


@dataclass(frozen=True, slots=True)
class Load:
    """Work with requests always waiting."""

    core: GenerationCore
    supply: Supply

    def step(self) -> None:
        """Run the next step."""
        self.supply.top_up()
        self.core.step()

    def run_for(self, seconds: float, place: Place) -> float:
        """Run steps for some seconds, and a few at least; return the actual duration."""
        started = time.perf_counter()
        for num_steps in count():
            took = time.perf_counter() - started
            if num_steps >= FEWEST_STEPS and took >= seconds:
                break
            self.step()
        place.wait()
        return time.perf_counter() - started


def window(place: Place, load: Load) -> Numbers:
    """Count the tokens of some seconds."""
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
        "window_seconds": seconds,
    }
