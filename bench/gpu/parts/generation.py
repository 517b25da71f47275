"""Tokens per second of the whole engine except its texts, against published figures and roofline.

Random weights of a shape in some form, requests of one mix without end, and a window of seconds. As
many run from the start as fit, in the middle of their outputs: their keys and values are noise with
the right length (`bench.gpu.supply`). The window begins when a second has passed without a capture.
Then some steps run in torch's profiler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from bench.gpu.anchors import ANCHORS, DATATROVE, MLPERF
from bench.gpu.mixes import Mix
from bench.gpu.parts.models import CountedCapture, core_of, made
from bench.gpu.parts.profiles import profiled
from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.roofline import serial
from bench.gpu.shapes import MIXED, TINY_MIXED, architecture
from bench.gpu.supply import Supply
from tidemill.engine.kernels.triton import linear
from tidemill.engine.loop.generation import GenerationCore
from tidemill.engine.model.config.device import step_limits


@dataclass(frozen=True, slots=True)
class Run:
    """A model with the form of its weights, its KV cache and a mix.

    4-bit products are those of a dequantized weight from `dequantized_from` rows per matrix on, or
    from the engine's own number.
    """

    model: str
    form: str = ""
    mix: Mix = DATATROVE
    has_fp8_cache: bool = False
    dequantized_from: int | None = None

    def __str__(self) -> str:
        """Return it in words."""
        form = f", {self.form}" if self.form else ""
        cache = ", fp8 KV" if self.has_fp8_cache else ""
        most = self.dequantized_from
        threshold = "" if most is None else f", dequantized from {most} rows"
        return f"{self.model}{form}{cache}{threshold} {self.mix}"


WORK = (
    Run("llama-3-8b", "fp8", MLPERF),
    Run("llama-3-8b", "fp8", MLPERF, has_fp8_cache=True),
    Run("gpt-oss-20b", "mxfp4"),
    Run("gpt-oss-20b", "mxfp4", dequantized_from=512),
    Run("qwen3-8b"),
    Run("qwen3-0.6b"),
    Run("qwen3-0.6b", mix=Mix(1024, 128)),
    Run("qwen3-8b", has_fp8_cache=True),
    Run("qwen3-0.6b", has_fp8_cache=True),
    Run("smollm2-1.7b"),
    Run("qwen3-30b-a3b", "fp8"),
    Run("llama-3-8b", "int4", MLPERF),
    *(Run(name) for name in MIXED),
)
TINY_MIX = Mix(12, 6, shared=16)
TINY_WORK = (
    Run("tiny", mix=TINY_MIX),
    Run("tiny", "int4", TINY_MIX, has_fp8_cache=True, dequantized_from=8),
    *(Run(name, mix=TINY_MIX) for name in TINY_MIXED),
)
# Usual seconds: those of a run, and those of creating its model.
SECONDS, MODEL_SECONDS = 11.0, 5.0
# The window, the time without a capture before it, and the longest time until it begins.
WINDOW_SECONDS, QUIET_SECONDS, MOST_WARM_SECONDS = 5.0, 1.0, 8.0
PROFILED_STEPS, FEWEST_STEPS = 8, 4
MANY = 1 << 30


def tasks(place: Place) -> Iterator[Task]:
    """Yield each model with each mix."""
    for run in TINY_WORK if place.is_tiny else WORK:
        yield Task(str(run), partial(generate, place, run), SECONDS + MODEL_SECONDS)


def generate(place: Place, run: Run) -> Numbers:
    """Measure one run."""
    with dequantizing_from(run.dequantized_from):
        return _generate(place, run)


@contextmanager
def dequantizing_from(most: int | None) -> Iterator[None]:
    """Set the number of rows from which 4-bit weights are dequantized."""
    engines = linear.most_rows
    if most is not None:
        linear.most_rows = lambda _weight: most  # type: ignore[assignment]
    try:
        yield
    finally:
        linear.most_rows = engines


def _generate(place: Place, run: Run) -> Numbers:
    mix = run.mix
    found = made(
        run.model, place.device, run.form, has_fp8_cache=run.has_fp8_cache, is_tiny=place.is_tiny
    )
    model, room, config = found
    shape, limits = architecture(run.model), step_limits(config, place.device)
    core, counted = core_of(found, config)
    # Layers in groups each take a page; recurrent ones a row.
    places = room.num_pages * model.backend.page_size // len(model.layer_groups)
    num_first = mix.at_once(places, min(limits.max_num_seqs, room.num_rows or MANY))
    scheduler = core._scheduler  # noqa: SLF001 - not all of its steps are computed
    supply = Supply(mix, scheduler, core.add, num_first, model.vocab_size)
    num_filling = supply.fill()
    load = Load(core, supply)
    warm_seconds = load.warm(counted, place)
    warm = 0 if counted is None else counted.captured
    numbers = window(place, load)
    if not (run.form or run.has_fp8_cache or model.recurrent_shapes):  # others have another ceiling
        bound = serial(shape, place.card, mix).outputs_per_second
        numbers["of_roofline"] = numbers["outputs_per_second"] / bound
    if not run.has_fp8_cache and (anchor := ANCHORS.get((run.model, run.form, mix))):
        numbers["of_anchor"] = numbers["outputs_per_second"] / anchor.published
        numbers["bound"] = anchor.expected
        numbers["holds"] = numbers["of_anchor"] >= anchor.expected
    if counted is not None:
        numbers["captures"], numbers["captures_failed"] = counted.captured, counted.failed
        numbers["captures_in_window"] = counted.captured - warm
        numbers["capture_seconds"] = core.stats().capture_seconds
        numbers["reserved_bytes"] = torch.cuda.memory_reserved(place.device)
        numbers["allocated_bytes"] = torch.cuda.max_memory_allocated(place.device)
    numbers.update(
        warm_seconds=warm_seconds,
        num_pages=room.num_pages,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        sequences_at_first=num_first,
        steps_of_filling=num_filling,
        profile=profiled(place, load.step, 1 if place.is_tiny else PROFILED_STEPS),
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

    def warm(self, counted: CountedCapture | None, place: Place) -> float:
        """Run until kernels are compiled and no new graph is captured; return the seconds."""
        started = quiet = time.perf_counter()
        num_captured = -1
        if place.is_tiny:
            self.step()
        while not place.is_tiny:
            self.step()
            now = time.perf_counter()
            if counted is not None and counted.captured != num_captured:
                num_captured, quiet = counted.captured, now
            if now - quiet >= QUIET_SECONDS or now - started >= MOST_WARM_SECONDS:
                break
        place.wait()
        return time.perf_counter() - started

    def run_for(self, seconds: float, place: Place) -> float:
        """Run steps for some seconds, and a few at least; return the actual duration."""
        started = time.perf_counter()
        for num_steps in count():
            took = time.perf_counter() - started
            if num_steps >= (1 if place.is_tiny else FEWEST_STEPS) and took >= seconds:
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
