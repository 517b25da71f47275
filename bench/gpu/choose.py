"""Writes `engine/kernels/triton/tuned_tiles.json` from a card's timings of each kernel's tiles.

    python -m bench.gpu.choose [--models Llama-3-8B,Qwen3-0.6B] [--kernels grouped,sort_experts]
        [--dtype bfloat16] [--seconds 480] [--results FOLDER] [--dry-run]

Each model is a few layers with random weights, and goes through steps that are full of decodes,
full of a prompt, and mixed. For each kernel and shape in use, one number of its choice is changed
after the other, and changes that make the model's steps faster are kept: only the card's time in
Triton's kernels counts. Choices that do not fit the card, or give other numbers, are skipped. A
better choice is written as an entry for that card's architecture and that shape, after each kernel,
so that an interrupted run is not lost. With `--results` it goes to a copy of the file in that
folder, next to a line for each kernel that need not be tried again. `--dry-run` needs no card: it
prints the kernels that it would try. `Qwen3-30B-A3B:int4` has quantised weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tidemill.engine.kernels import backends
from tidemill.engine.kernels.backends import choose_sampling
from tidemill.engine.kernels.paged_step import Span, paged_step
from tidemill.engine.kernels.quantised import Matrix, Quantised
from tidemill.engine.kernels.step import Step
from tidemill.engine.kernels.triton import tuned_tiles
from tidemill.engine.kernels.triton.launch import compile_only
from tidemill.engine.kernels.triton.tuned_tiles import (
    ConfigKey,
    KernelConfig,
    lookup_config,
    override_configs,
    parse_configs,
)
from tidemill.engine.model.compile_kernels import (
    META,
    Quantise,
    fp8_blocks,
    fp8_rows,
    int4_groups,
    mixed_metadata,
    mxfp4_experts,
    without_memory,
)
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.usual_models import USUAL_MODELS
from tidemill.engine.model.weights.weight_map import weights_of

DRY_ARCH = 90
# Steps by their spans, each as (tokens before it, its own tokens).
STEPS: Mapping[str, Sequence[tuple[int, int]]] = {
    "few": [(1024, 1)] * 64,
    "decode": [(1024, 1)] * 256,
    "many": [(1024, 1)] * 512,
    "prompt": [(0, 4096)],
    "mixed": [*[(700, 1)] * 200, (0, 300), (512, 500)],
}
WARPS, STAGES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5)
SMALLEST, LARGEST = 1, 4096
TIMES = 5
# The least speed-up for a choice to be written.
GAIN = 0.02
TRIED = "tried.jsonl"
TOLERANCE = 0.05
E8M0_BIAS = 127
UNFIT = (OutOfResources, PTXASError, CompilationError)

# A model's weights by the suffix of its name.
FORMS: Mapping[str, Quantise | None] = {
    "": None,
    "fp8": fp8_rows,
    "blocks": fp8_blocks,
    "int4": int4_groups,
    "mxfp4": mxfp4_experts,
}

Times = Callable[[KernelConfig], float | None]


@dataclass(frozen=True, slots=True)
class Found:
    """The best choice of a kernel for a shape, with its time and the previous one's, in ms."""

    choice: KernelConfig
    took: float
    before: float


def changed(choice: KernelConfig) -> list[list[KernelConfig]]:
    """Return, for each number of a choice, the choices that differ only in that number."""
    tiles = [
        [
            replace(choice, sizes={**choice.sizes, name: other})
            for other in (size // 2, size * 2)
            if SMALLEST <= other <= LARGEST
        ]
        for name, size in choice.sizes.items()
    ]
    warps = [replace(choice, num_warps=count) for count in WARPS if count != choice.num_warps]
    stages = [replace(choice, num_stages=count) for count in STAGES if count != choice.num_stages]
    return [*tiles, warps, stages]


def best_of(choice: KernelConfig, times: Times) -> Found | None:
    """Improve a choice one number after the other; None if it does not run."""
    before = times(choice)
    if before is None:
        return None
    best = Found(choice, before, before)
    for number in range(len(changed(choice))):
        for candidate in changed(best.choice)[number]:
            took = times(candidate)
            if took is not None and took < best.took:
                best = Found(candidate, took, before)
    return best


def merged(data: Mapping[str, Any], requested: ConfigKey, choice: KernelConfig) -> dict[str, Any]:
    """Return the file's data with a choice for the requested key, replacing any previous one."""
    kernel, shape = requested
    where = dict(sorted(shape))
    entry = {
        "where": where,
        "sizes": dict(choice.sizes),
        "num_warps": choice.num_warps,
        "num_stages": choice.num_stages,
    }
    others = [one for one in data[kernel] if one.get("where", {}) != where]
    return {**data, kernel: [*others, entry]}


def printed(data: Mapping[str, Any]) -> str:
    """Return the file's text, with one entry per line."""
    kernels = (
        f"  {json.dumps(kernel)}: [\n"
        + ",\n".join(f"    {json.dumps(entry)}" for entry in data[kernel])
        + "\n  ]"
        for kernel in data
    )
    text = "{\n" + ",\n".join(kernels) + "\n}\n"
    parse_configs(json.loads(text))
    return text


def quantised(weight: Tensor, quantise: Quantise) -> Matrix:
    """Return random numbers of about the size of a quantised weight's."""
    made = quantise(weight)
    if weight.is_meta or not isinstance(made, Quantised):
        return made
    if made.is_fp8:
        made.scales.fill_(1.0)
        return made
    made.numbers.random_()
    if made.zeros is None:
        made.scales.fill_(E8M0_BIAS - weight.shape[-1].bit_length() // 2)
    else:
        made.scales.fill_(0.2 * weight.shape[-1] ** -0.5)
        made.zeros.fill_(8)
    return made


class Bench:
    """A model with random weights on a device, and the steps to time."""

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        name, _, form = model.partition(":")
        architecture, quantise = USUAL_MODELS[name], FORMS[form]
        # The last layer computes only the rows whose logits are wanted.
        blocks = (*architecture.blocks, architecture.blocks[-1])
        self._architecture = architecture = replace(architecture, blocks=blocks)
        self._dtype, self._device = dtype, device
        self._weights: dict[str, Matrix] = {}
        for weight in weights_of(architecture):
            drawn = self._random(weight.shape)
            if quantise is None or not weight.role.endswith("_proj"):
                self._weights[weight.role] = drawn
            else:
                self._weights[weight.role] = quantised(drawn, quantise)
        self._right: list[Tensor] | None = None

    @torch.inference_mode()
    def run(self) -> list[Tensor]:
        """Run each step once and return the logits."""
        for name, module in list(sys.modules.items()):
            # Clear the caches of choices.
            if name.startswith("tidemill.engine.kernels.triton."):
                for value in vars(module).values():
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()
        shapes = self._architecture.attention_shapes
        backend = backends.choose_backend(shapes, self._dtype, self._device)
        sampling = choose_sampling(self._dtype, self._device)
        network = Decoder(self._architecture, dict(self._weights))
        came = []
        for spans in STEPS.values():
            size = backend.page_size
            num_pages = sum(-(-(context + count) // size) for context, count in spans)
            attention = backend(shapes, num_pages, self._dtype, self._device)
            step = packed(spans, size, self._architecture.vocab_size, self._device)
            attention.prepare(step)
            logits = network.forward(step, attention)
            sampled = sampling.sample(logits, mixed_metadata(*logits.shape))
            sampling.compute_logprobs(logits, np.arange(len(logits)), sampled.token_ids, 2)
            came.append(logits)
        return came

    def times(self, requested: ConfigKey, choice: KernelConfig) -> float | None:
        """Return the milliseconds in Triton's kernels with a choice; None if it is unfit."""
        with override_configs({requested: choice}):
            try:
                came = self.run()
            except UNFIT:
                return None
            if not self._is_right(came):
                return None
            took = []
            for _ in range(TIMES):
                with profile(activities=[ProfilerActivity.CUDA]) as watched:
                    self.run()
                    torch.cuda.synchronize()
                took.append(sum(map(_milliseconds, watched.key_averages())))
        return min(took)

    def _is_right(self, came: list[Tensor]) -> bool:
        if self._right is None:
            self._right = came
        return all(
            bool((got.float() - right.float()).norm() <= TOLERANCE * right.float().norm())
            for got, right in zip(came, self._right, strict=True)
        )

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        if self._device == META:
            return torch.empty(shape, dtype=self._dtype, device=META)
        drawn = torch.Generator(self._device).manual_seed(0)
        return torch.randn(shape, dtype=self._dtype, device=self._device, generator=drawn).mul_(
            shape[-1] ** -0.5
        )


def _milliseconds(event: Any) -> float:
    """Return an event's time on the card, if it is one of our kernels, by its name."""
    is_ours = event.key.startswith("_") and not event.key.startswith("_Z")  # mangled C++
    return event.device_time_total / 1000 if is_ours else 0.0


def packed(
    spans: Sequence[tuple[int, int]], page_size: int, vocabulary: int, device: torch.device
) -> Step:
    """Return a step of spans on separate pages, with logits for each span's last token."""
    counts = [-(-(context + length) // page_size) for context, length in spans]
    order = np.random.default_rng(0).permutation(sum(counts))
    pages = np.split(order, np.cumsum(counts)[:-1])
    on_pages = [
        Span(context, context + length, own)
        for (context, length), own in zip(spans, pages, strict=True)
    ]
    token_ids = np.arange(sum(length for _, length in spans)) % vocabulary
    return paged_step(on_pages, page_size, device, token_ids=token_ids)


def requested_by(bench: Bench, kernels: Sequence[str]) -> list[ConfigKey]:
    """Return a model's shapes for some kernels, or for all."""
    with override_configs({}) as requested:
        bench.run()
        own = (one for one in requested if not kernels or one[0] in kernels)
        return sorted(own, key=lambda one: (one[0], sorted(one[1], key=str)))


def choose_all(
    models: Sequence[str],
    kernels: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    *,
    results: Results,
    seconds: float,
) -> None:
    """Try the choices of each kernel that has no record yet, and write better ones."""
    until = time.monotonic() + seconds
    for model in models:
        bench, done = Bench(model, dtype, device), results.done()
        for kernel, shape in requested_by(bench, kernels):
            called = f"{kernel} {json.dumps(dict(sorted(shape)))}"
            if called in done:
                continue
            if time.monotonic() > until:
                print("the time is up", flush=True)
                return
            found = best_of(
                lookup_config(kernel, shape),
                until_then(until, partial(bench.times, (kernel, shape))),
            )
            is_better = found is not None and found.took <= (1 - GAIN) * found.before
            if found is not None and is_better:
                results.write((kernel, shape), found.choice)
            if time.monotonic() > until:
                continue  # not all of it was tried
            numbers = {} if found is None else {"before": found.before, "took": found.took}
            results.append(called, {"model": model, "is_better": is_better, **numbers})
            outcome = "does not run"
            if found is not None:
                outcome = f"{found.before:.3f} → {found.took:.3f} ms"
            print(f"{model}: {called}: {outcome}", flush=True)


def until_then(until: float, times: Times) -> Times:
    """Return a filter that rejects every choice from a time of the monotonic clock on."""
    return lambda choice: None if time.monotonic() > until else times(choice)


class Results:
    """The tried choices, one JSON line per kernel, and the resulting file of choices."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.file = tuned_tiles.FILE
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = folder / tuned_tiles.FILE.name
            if not self.file.exists():
                shutil.copy(tuned_tiles.FILE, self.file)

    def done(self) -> set[str]:
        """Return the kernels and shapes that an earlier call has tried."""
        if self._folder is None or not (path := self._folder / TRIED).exists():
            return set()
        lines = path.read_text(encoding="utf-8").splitlines()
        return {json.loads(line)["kernel"] for line in lines}

    def append(self, called: str, numbers: Mapping[str, object]) -> None:
        """Record a kernel that was tried."""
        if self._folder is not None:
            with (self._folder / TRIED).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kernel": called, **numbers}) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def write(self, requested: ConfigKey, choice: KernelConfig) -> None:
        """Write a choice atomically."""
        data = merged(json.loads(self.file.read_text(encoding="utf-8")), requested, choice)
        new = self.file.with_suffix(".new")
        new.write_text(printed(data), encoding="utf-8")
        new.replace(self.file)


def print_candidates(models: Sequence[str], kernels: Sequence[str], dtype: torch.dtype) -> None:
    """Print the choices that would be tried for each kernel and shape, without a card."""
    for model in models:
        with knobs.runtime.scope(), compile_only(DRY_ARCH), without_memory():
            knobs.runtime.jit_cache_hook = lambda **_: True  # as good as compiled
            requested = requested_by(Bench(model, dtype, META), kernels)
        for kernel, shape in requested:
            count = sum(map(len, changed(lookup_config(kernel, shape))))
            sys.stdout.write(f"{model}: {kernel} {json.dumps(dict(sorted(shape)))}: {count}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="Llama-3-8B,Qwen3-0.6B")
    parser.add_argument("--kernels", default="")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument(
        "--results", type=Path, help="write results to this folder, for a temporary machine"
    )
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    models, dtype = options.models.split(","), getattr(torch, options.dtype)
    kernels = list(filter(None, options.kernels.split(",")))
    if unknown := set(kernels) - json.loads(tuned_tiles.FILE.read_text(encoding="utf-8")).keys():
        parser.error(f"unknown kernel {min(unknown)}")
    named = [model.partition(":") for model in models]
    if unknown := {form for _, _, form in named} - FORMS.keys():
        parser.error(
            f"unknown quantisation {min(unknown)}: choose from {', '.join(filter(None, FORMS))}"
        )
    if unknown := {name for name, _, _ in named} - USUAL_MODELS.keys():
        parser.error(f"unknown model {min(unknown)}: choose from {', '.join(USUAL_MODELS)}")
    if options.dry_run:
        print_candidates(models, kernels, dtype)
        return 0
    if not torch.cuda.is_available():
        parser.error("no GPU found: use --dry-run, which needs none")
    results = Results(options.results)
    choose_all(
        models, kernels, dtype, torch.device("cuda"), results=results, seconds=options.seconds
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
