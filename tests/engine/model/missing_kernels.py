"""`python -m tests.engine.model.missing_kernels`: kernels of runs that are not precompiled.

Tiny models run on the CPU; their steps and rules are kept, and gone through again on tensors of no
memory as if these were a GPU's. A line for each kernel and form that the same model, compiled
beforehand, did not ask for. Nothing is compiled: it is enough to know what would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton import knobs

from tests.engine.families import build
from tidemill.engine.config import EngineConfig
from tidemill.engine.kernels import backends
from tidemill.engine.kernels.attention import AttentionBackend
from tidemill.engine.kernels.sampling import Logprobs, Sampled, SamplingMetadata
from tidemill.engine.kernels.step import Step
from tidemill.engine.kernels.triton.launch import compile_only
from tidemill.engine.loop import logprobs, sampler
from tidemill.engine.loop.assembly import make_core
from tidemill.engine.model import compile_kernels, native
from tidemill.engine.model.compile_kernels import META, without_memory
from tidemill.engine.model.config.architecture import Architecture
from tidemill.engine.model.config.hf_config import read_hf_config
from tidemill.engine.model.families.registry import architecture_of
from tidemill.engine.model.network.kv_cache_size import KVCacheSize
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.usual_models import USUAL_MODELS
from tidemill.engine.model.weights.checkpoint import find_checkpoint
from tidemill.engine.scheduling.sequence import Sampling, SequenceRequest

CPU = torch.device("cpu")
# Norms of heads; a cap on scores, a window, norms with an offset; sinks, biases and experts;
# latents; and recurrences.
FAMILIES = (
    *("Qwen3Config", "Gemma2Config", "GptOssConfig", "DeepseekV3Config"),
    *("Qwen3NextConfig", "BambaConfig"),
)
USUAL = ("Gemma-4-31B", "gpt-oss-20b", "DeepSeek-V3", "Qwen3-Next-80B-A3B", "Nemotron-Nano-9B-v2")
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=0, repetition_penalty=1.1, logit_bias={5: 2.0}, logprobs=2),
    Sampling(temperature=1, seed=2, top_k=5, top_p=0.9, min_p=0.01, logprobs=0),
)
Form = tuple[str, str]


class Kept:
    """A network, or functions, whose calls are recorded."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.steps: list[Step] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        """Delegate to the wrapped network."""
        return getattr(self._inner, name)

    def forward(self, step: Step, attention: AttentionBackend) -> Tensor:
        """Record the step."""
        self.steps.append(step)
        logits: Tensor = self._inner.forward(step, attention)
        return logits

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Sampled:
        """Record the sampling inputs."""
        self.calls.append(("sample", (logits, metadata)))
        sampled: Sampled = self._inner.sample(logits, metadata)
        return sampled

    def compute_logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: Tensor, top: int
    ) -> Logprobs:
        """Record the scored tokens."""
        self.calls.append(("compute_logprobs", (logits, rows, chosen, top)))
        found: Logprobs = self._inner.compute_logprobs(logits, rows, chosen, top)
        return found


def requested_by(go: Callable[[], None]) -> set[Form]:
    """Return the kernels that a call would compile, each with its types, sizes and options."""
    found: set[Form] = set()

    def note(*, key: str, fn: Any, **_: object) -> bool:
        found.add((fn.name, key))
        return True  # as good as compiled

    with knobs.runtime.scope(), compile_only(90), without_memory():
        knobs.runtime.jit_cache_hook = note
        go()
    return found


def tiny(family: str, folder: str) -> tuple[Architecture, LoadedModel]:
    """Return a model of a family for our decoder, and its architecture."""
    build(family).save_pretrained(folder)
    hf_config = read_hf_config(folder)
    architecture = architecture_of(hf_config)
    checkpoint = find_checkpoint(folder)
    model = native.load(checkpoint, hf_config, architecture, torch.float32, CPU)
    return architecture, model


def run(model: LoadedModel) -> tuple[Kept, Kept]:
    """Run sequences that share a beginning, in mixed steps; return the recorded calls."""
    network, functions = Kept(model.network), Kept(sampler.choose_sampling(torch.float32, CPU))
    for module in (sampler, logprobs):
        module.choose_sampling = lambda *_: functions  # type: ignore[attr-defined]
    config = EngineConfig("tiny", max_num_seqs=8, max_num_batched_tokens=64)
    work = make_core(
        replace(model, network=network), KVCacheSize(64, model.max_model_len, 16), config
    )
    for number, sampling in enumerate(SAMPLINGS):
        for ids in ([*[7] * 100, 10 + number], [30 + number, 31]):
            work.add(SequenceRequest(ids, 4, sampling, prompt_logprobs=number % 2))
    while work.step() is not None:
        pass
    return network, functions


@torch.inference_mode()
def replay(architecture: Architecture, network: Kept, functions: Kept) -> None:
    """Replay recorded calls on tensors that have no memory."""
    decoder, attention = compile_kernels.make_meta_decoder(architecture, torch.float32)
    for step in network.steps:
        host = {
            field.name: value.numpy()
            for field in fields(step)
            if isinstance(value := getattr(step, field.name), Tensor)
        }
        on_meta = Step.pack(step.num_decodes, META, **host)
        attention.prepare(on_meta)
        decoder.forward(on_meta, attention)
    sampling = backends.choose_sampling(torch.float32, META)
    for name, arguments in functions.calls:
        moved = [part.to(META) if isinstance(part, Tensor) else part for part in arguments]
        getattr(sampling, name)(*moved)


def main() -> int:
    """Print kernels that are not compiled beforehand, and usual models that cannot compile."""
    for family in FAMILIES:
        with TemporaryDirectory() as folder:
            architecture, model = tiny(family, folder)
        kept = run(model)
        compiled = requested_by(lambda made=architecture: compile_kernels.run(made, torch.float32))  # type: ignore[misc]
        of_run = requested_by(lambda made=architecture, kept=kept: replay(made, *kept))  # type: ignore[misc]
        for form in sorted(of_run - compiled):
            sys.stdout.write(f"{family}: {form}\n")
        assert of_run, "no kernel of the GPU was requested"
        sys.stderr.write(f"{family}: {len(kept[0].steps)} steps, {len(compiled)} forms\n")
    of_quantised = (("Llama-3-8B", quantise) for quantise in compile_kernels.QUANTISATIONS)
    for name, quantise in (
        *((name, None) for name in USUAL),
        *of_quantised,
    ):
        run_usual = partial(compile_kernels.run, USUAL_MODELS[name], torch.bfloat16)
        forms = requested_by(partial(run_usual, quantise=quantise))
        sys.stderr.write(f"{name} {quantise and quantise.__name__}: {len(forms)} forms\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
