"""`python -m tidemill.engine.model.compile_kernels 80 90`: compiles kernels for these GPUs.

Image builds call it. It needs a C compiler for the code that calls the driver, but no GPU. The
kernels are written to TRITON_CACHE_DIR. Models of usual shapes run steps on tensors without memory:
kernels are compiled instead of launched, exactly those that a run would launch. Such a tensor has
no values to read, so a step that completes proves that the host never waits for the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import numpy as np
import torch
from torch import Tensor

from ..kernels import backends
from ..kernels.attention import AttentionBackend
from ..kernels.hybrid import make_hybrid
from ..kernels.paged_step import Span, paged_step
from ..kernels.quantised import BLOCK, FP8, WORDS_A_BLOCK, Matrix, Quantised
from ..kernels.sampling import SamplingMetadata
from ..kernels.step import Step
from ..kernels.triton import compile_all as of_kernels
from ..kernels.triton.driver import compile_module
from ..kernels.triton.launch import compile_only
from .config.architecture import Architecture
from .network.decoder import Decoder
from .usual_models import USUAL_MODELS
from .weights.weight_map import weights_of

META = torch.device("meta")
# Dtypes of stored models, and of parity checks.
DTYPES = (torch.bfloat16, torch.float32)
# Steps by their spans, each as (tokens before it, its own tokens). Token counts are one, odd and
# multiples of 16; steps are decodes, a chunk, or both, with long contexts and with none.
STEPS = (
    ((40, 1),),
    ((100, 1),) * 3,
    ((2000, 1),) * 16,
    ((0, 7),),
    ((0, 256),),
    ((5, 1), (2000, 1), (33, 160), (0, 3)),
)
# For experts, whose tiles depend on the rows per expert: from 8 to 128 for 128 experts. Only
# decodes, because the last layer's experts have no other tokens.
EXPERT_STEPS = tuple(((40, 1),) * count for count in (64, 128, 256, 512, 1024, 4096))


@contextmanager
def without_memory() -> Iterator[None]:
    """Let tensors without memory be served like those of a GPU."""
    backends.TRITON_TYPES.add(META.type)
    try:
        yield
    finally:
        backends.TRITON_TYPES.remove(META.type)


def fp8_rows(weight: Tensor) -> Quantised:
    """Return an fp8 weight of the same shape `[…, O, I]`, with a scale per row."""
    return _fp8(weight, weight.shape[-1])


def fp8_blocks(weight: Tensor) -> Quantised:
    """Return an fp8 weight of the same shape `[…, O, I]`, with a scale per 128 inputs."""
    return _fp8(weight, BLOCK)


def int4_groups(weight: Tensor) -> Quantised:
    """Return an int4 weight of the same shape `[…, O, I]`, with scale and zero per 128 inputs."""
    *outputs, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    words = weight.new_empty(*outputs, blocks * WORDS_A_BLOCK, dtype=torch.int32)
    scales = weight.new_empty(*outputs, blocks, dtype=torch.float32)
    zeros = weight.new_empty(*outputs, blocks, dtype=torch.uint8)
    return Quantised(words, scales, zeros, inputs, BLOCK, weight.dtype)


def mxfp4_experts(weight: Tensor) -> Matrix:
    """Return experts `[E, O, I]` in fp4, with a scale per 32 inputs; other weights stay."""
    if weight.ndim == 2:
        return weight
    *outputs, inputs = weight.shape
    words = weight.new_empty(*outputs, -(-inputs // BLOCK) * WORDS_A_BLOCK, dtype=torch.int32)
    scales = weight.new_empty(*outputs, -(-inputs // 32), dtype=torch.uint8)
    return Quantised(words, scales, None, inputs, 32, weight.dtype)


def _fp8(weight: Tensor, group: int) -> Quantised:
    *outputs, inputs = weight.shape
    scales = weight.new_empty(*outputs, -(-inputs // group), dtype=torch.float32)
    return Quantised(weight.to(FP8), scales, None, inputs, group, weight.dtype)


Quantise = Callable[[Tensor], Matrix]
# The most common formats of quantised models.
QUANTISATIONS: tuple[Quantise, ...] = (fp8_rows, fp8_blocks, int4_groups)


def quantisations_of(architecture: Architecture) -> tuple[Quantise, ...]:
    """Return the formats of a model's quantised weights: GPT-OSS is published in mxfp4."""
    experts = architecture.blocks[0].experts
    of_gpt_oss = experts is not None and experts.has_biases
    return (*QUANTISATIONS, mxfp4_experts) if of_gpt_oss else QUANTISATIONS


def make_meta_decoder(
    architecture: Architecture,
    dtype: torch.dtype,
    kept: torch.dtype | None = None,
    quantise: Quantise | None = None,
) -> tuple[Decoder, AttentionBackend]:
    """Return a decoder without numbers, and its attention over one page in its own dtype.

    `quantise` makes the weights of its linear layers and of its experts.
    """
    kept = kept or dtype
    weights: dict[str, Matrix] = {
        weight.role: torch.empty(weight.shape, dtype=dtype, device=META)
        for weight in weights_of(architecture)
    }
    if quantise is not None:
        for role, weight in weights.items():
            if role.endswith("_proj") and isinstance(weight, Tensor):
                weights[role] = quantise(weight)
    shapes, recurrent = architecture.attention_shapes, architecture.recurrent_shapes
    attention = backends.choose_backend(shapes, kept, META)(shapes, 1, kept, META)
    if not recurrent:
        return Decoder(architecture, weights), attention
    recurrence = backends.choose_recurrence(recurrent, dtype, META)(recurrent, 1, dtype, META)
    return Decoder(architecture, weights), make_hybrid(attention, recurrence)


@torch.inference_mode()
def run(
    architecture: Architecture,
    dtype: torch.dtype,
    kept: torch.dtype | None = None,
    quantise: Quantise | None = None,
) -> None:
    """Run all steps of a decoder and choose and score its tokens."""
    network, attention = make_meta_decoder(architecture, dtype, kept, quantise)
    sampling = backends.choose_sampling(dtype, META)
    has_experts = any(block.experts for block in architecture.blocks)
    for spans in (*STEPS, *(EXPERT_STEPS if has_experts else ())):
        step = packed(spans, attention.page_size)
        attention.prepare(step)
        logits = network.forward(step, attention)
        sampled = sampling.sample(logits, mixed_metadata(*logits.shape))
        rows = np.arange(len(logits))
        sampling.compute_logprobs(logits, rows, sampled.token_ids, 2)


def packed(spans: Iterable[tuple[int, int]], page_size: int) -> Step:
    """Return a step of spans on the first page; the logits of each span's last token are wanted."""
    on_pages = []
    for context, length in spans:
        stop = context + length
        on_pages.append(Span(context, stop, np.zeros(-(-stop // page_size), np.int64)))
    states = np.zeros(len(on_pages), np.int64)
    return paged_step(on_pages, page_size, META, state_sources=states, state_rows=states)


def mixed_metadata(count: int, vocabulary: int) -> SamplingMetadata:
    """Return sampling rules: every other row is greedy, the others use every feature."""
    numbers, whole = np.ones(count, np.float32), np.zeros(count, np.int64)
    is_other = np.arange(count) % 2 == 1
    return SamplingMetadata(
        temperature=is_other.astype(np.float32),
        top_k=np.where(is_other, 5, 0),
        top_p=np.where(is_other, np.float32(0.9), np.float32(1)),
        log_min_p=np.where(is_other, np.float32(-5), np.float32(-np.inf)),
        draws=np.zeros(count),
        has_processors=is_other,
        repetition_penalty=numbers * np.float32(1.1),
        presence_penalty=numbers,
        frequency_penalty=numbers,
        tokens=np.zeros((count, 4), np.int32),
        slots=np.arange(count),
        num_prompt=whole + 1,
        num_known=whole + 2,
        bias_starts=np.arange(count + 1),
        bias_ids=whole,
        bias=numbers,
        ban_starts=np.arange(count + 1),
        ban_ids=whole + 1,
        mask_rows=np.where(is_other, 0, -1),
        masks=np.zeros((1, -(-vocabulary // 32)), np.uint32),
    )


def compile_all(arch: int, models: Iterable[Architecture] = tuple(USUAL_MODELS.values())) -> None:
    """Compile a model's kernels for an architecture such as 90, in each dtype it may run in."""
    with compile_only(arch), without_memory():
        for architecture in models:
            for dtype in DTYPES:
                run(architecture, dtype)
            run(architecture, DTYPES[0], FP8)
            for quantise in quantisations_of(architecture):
                run(architecture, DTYPES[0], quantise=quantise)


def main(architectures: Sequence[int]) -> int:
    """Compile everything, each architecture in its own process; return the exit status."""
    compile_module()
    # Fresh processes, because the state of torch and Triton does not survive a fork.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for done in [
            pool.submit(compile_for, arch)
            for arch in architectures
            for compile_for in (compile_all, of_kernels.compile_all)
        ]:
            done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
