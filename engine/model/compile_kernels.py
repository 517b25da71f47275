"""`python -m tidemill.engine.model.compile_kernels 80 90`: compiles kernels for these GPUs.

Whoever builds an image calls it; no card is needed, but a C compiler, for what calls the driver.
What is made lies where TRITON_CACHE_DIR says. Models of usual shapes go through steps on tensors
that have no memory: kernels are compiled instead of launched, exactly those that a run would
launch. As such a tensor has no numbers to be asked for, that steps get through shows that none
makes the host wait for the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import backends
from ..kernels.attention import AttentionBackend, AttentionShape
from ..kernels.elementwise import Activation, Gate
from ..kernels.hybrid import make_hybrid
from ..kernels.quantised import BLOCK, FP8, WORDS_A_BLOCK, Matrix, Quantised
from ..kernels.recurrence import GatedDelta, RecurrentShape, StateSpace
from ..kernels.sampling import SamplingMetadata
from ..kernels.step import Step
from ..kernels.triton import compile_all as of_kernels
from ..kernels.triton.driver import compile_module
from ..kernels.triton.launch import compile_only
from .config.architecture import (
    NO_ATTENTION,
    NO_ROPE,
    SANDWICH,
    Architecture,
    Block,
    Experts,
    Latent,
    Recurrence,
    Rope,
    WeightNames,
)
from .families.gemma import GEMMA4_NAMES
from .network.decoder import Decoder
from .weights.weight_map import weights_of

META = torch.device("meta")
# What models are stored in, and what they are proved in.
DTYPES = (torch.bfloat16, torch.float32)
MAX_POSITIONS = 8192
# Steps by their spans, each the tokens before it and its own: numbers of tokens that are one, odd
# and a multiple of 16, decodes alone, a chunk alone, both; long contexts, and what has none.
STEPS = (
    ((40, 1),),
    ((100, 1),) * 3,
    ((2000, 1),) * 16,
    ((0, 7),),
    ((0, 256),),
    ((5, 1), (2000, 1), (33, 160), (0, 3)),
)
# For experts, whose tiles depend on how many rows each has: of 8 in 128 up to 128. Decodes, as the
# last layer's experts have no other tokens.
EXPERT_STEPS = tuple(((40, 1),) * count for count in (64, 128, 256, 512, 1024, 4096))


def decoder(
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    width: int,
    vocabulary: int,
    *,
    gate: Gate | Activation | None = None,
    window: int = 0,
    turned: int | None = None,
    softcap: float = 0.0,
    experts: Experts | None = None,
    has_sinks: bool = False,
    **fields: Any,
) -> Architecture:
    """Return a decoder of one layer, or with a `window` of one of each kind."""
    full = AttentionShape(*heads, width, width, width**-0.5, 0, softcap, has_sinks)
    rope = Rope((1.0,) * ((turned or width) // 2))
    shapes = [full, replace(full, window=window)] if window else [full]
    return Architecture(
        class_name="",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        max_positions=MAX_POSITIONS,
        blocks=tuple(Block(shape, rope, experts) for shape in shapes),
        rms_norm_eps=1e-6,
        gate=gate or Gate(),
        tie_word_embeddings=True,
        **fields,
    )


GEMMA: dict[str, Any] = {
    "gate": Gate("gelu_tanh"),
    "norm_offset": 1.0,
    "names": WeightNames(norms=SANDWICH),
    "embedding_scale": 48.0,
}


def gemma4(
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    full_heads: tuple[int, int],
    experts: Experts | None = None,
) -> Architecture:
    """Return a Gemma 4, whose full layers have heads of 512, and of keys and values one."""
    made = decoder(
        hidden,
        inner,
        heads,
        256,
        262_144,
        window=1024,
        experts=experts,
        has_qk_norm=True,
        has_value_norm=True,
        has_layer_scalar=True,
        logit_softcap=30.0,
        **{**GEMMA, "norm_offset": 0.0, "names": GEMMA4_NAMES},
    )
    full, sliding = made.blocks
    shape = AttentionShape(*full_heads, 512, 512, 1.0)
    full = Block(shape, Rope((1.0,) * 256), experts, has_keys_as_values=True)
    return replace(made, blocks=(full, sliding))


def latent_decoder(
    hidden: int, inner: int, heads: int, vocabulary: int, *, latent: Latent, experts: Experts
) -> Architecture:
    """Return a decoder of one layer, which attends to latents (MLA)."""
    made = decoder(hidden, inner, (heads, 1), latent.nope_dim, vocabulary, experts=experts)
    rank = latent.kv_rank
    shape = AttentionShape(heads, 1, rank + latent.rope_dim, rank, 0.1, has_latent_values=True)
    rope = Rope((1.0,) * (latent.rope_dim // 2))
    return replace(made, blocks=(Block(shape, rope, experts, latent=latent),))


def hybrid_decoder(made: Architecture, recurrence: Recurrence, *, has_mlp: bool) -> Architecture:
    """Return a decoder with a recurrent layer before its own."""
    (block,) = made.blocks
    first = replace(block, attention=NO_ATTENTION, rope=NO_ROPE, recurrence=recurrence)
    return replace(made, blocks=(replace(first, has_mlp=has_mlp), block))


def mamba2(heads: int, width: int, groups: int, state: int) -> Recurrence:
    """Return a layer of Mamba-2 behind a convolution of four taps."""
    rule = StateSpace(heads, width, groups, state)
    shape = RecurrentShape(sum(rule.widths), 4, rule=rule)
    return Recurrence(shape, groups, has_conv_bias=True)


_DELTA = GatedDelta(16, 32, 128, 128)
GATED_DELTA_NET = Recurrence(
    RecurrentShape(sum(_DELTA.widths), 4, rule=_DELTA), 32, is_norm_first=True
)
# Of each, what kernels are compiled by; what others have of the same numbers is compiled with them.
USUAL_MODELS = {
    "Qwen3-0.6B": decoder(1024, 3072, (16, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-4B": decoder(2560, 9728, (32, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-14B": decoder(5120, 17_408, (40, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-32B": decoder(5120, 25_600, (64, 8), 128, 151_936, has_qk_norm=True),
    "Qwen3-30B-A3B": decoder(
        2048, 6144, (32, 4), 128, 151_936, has_qk_norm=True, experts=Experts(128, 8, 768)
    ),
    "Qwen2.5-0.5B": decoder(896, 4864, (14, 2), 64, 151_936, qkv_bias=True),
    "Qwen2.5-1.5B": decoder(1536, 8960, (12, 2), 128, 151_936, qkv_bias=True),
    "Qwen2.5-7B": decoder(3584, 18_944, (28, 4), 128, 152_064, qkv_bias=True),
    "Llama-3.2-1B": decoder(2048, 8192, (32, 8), 64, 128_256),
    "Llama-3.2-3B": decoder(3072, 8192, (24, 8), 128, 128_256),
    "Llama-3-8B": decoder(4096, 14_336, (32, 8), 128, 128_256),
    "Llama-3-70B": decoder(8192, 28_672, (64, 8), 128, 128_256),
    "Mistral-7B": decoder(4096, 14_336, (32, 8), 128, 32_768, window=4096),
    "Mixtral-8x7B": decoder(
        4096, 14_336, (32, 8), 128, 32_000, experts=Experts(8, 2, 14_336, norm_topk_prob=True)
    ),
    "Phi-4-mini": decoder(3072, 8192, (24, 8), 128, 200_064, turned=96),
    "Gemma-3-4B": decoder(
        2560, 10_240, (8, 4), 256, 262_208, window=1024, has_qk_norm=True, **GEMMA
    ),
    "Gemma-2-9B": decoder(
        3584, 14_336, (16, 8), 256, 256_000, window=4096, softcap=50.0, logit_softcap=30.0, **GEMMA
    ),
    "Gemma-4-12B": gemma4(3840, 15_360, (16, 8), (16, 1)),
    "Gemma-4-26B-A4B": gemma4(
        2816,
        2112,
        (16, 8),
        (16, 2),
        Experts(128, 8, 704, shared_intermediate_size=2112, has_own_norms=True),
    ),
    "Gemma-4-31B": gemma4(5376, 21_504, (32, 16), (32, 4)),
    "DeepSeek-V2-Lite": latent_decoder(
        2048,
        10_944,
        16,
        102_400,
        latent=Latent(0, 512, 128, 64, 128),
        experts=Experts(64, 6, 1408, norm_topk_prob=False, shared_intermediate_size=2816),
    ),
    "DeepSeek-V3": latent_decoder(
        7168,
        18_432,
        128,
        129_280,
        latent=Latent(1536, 512, 128, 64, 128),
        experts=Experts(
            256,
            8,
            2048,
            "sigmoid",
            has_correction_bias=True,
            num_groups=8,
            topk_groups=4,
            routed_scaling_factor=2.5,
            shared_intermediate_size=2048,
        ),
    ),
    "GLM-4.7-Flash": latent_decoder(
        2048,
        10_240,
        20,
        154_880,
        latent=Latent(768, 512, 192, 64, 256),
        experts=Experts(
            64,
            4,
            1536,
            "sigmoid",
            has_correction_bias=True,
            routed_scaling_factor=1.8,
            shared_intermediate_size=1536,
        ),
    ),
    "Qwen3-Next-80B-A3B": hybrid_decoder(
        decoder(
            2048,
            5120,
            (16, 2),
            256,
            151_936,
            turned=64,
            norm_offset=1.0,
            has_qk_norm=True,
            has_output_gate=True,
            experts=Experts(512, 10, 512, shared_intermediate_size=512, has_shared_gate=True),
        ),
        GATED_DELTA_NET,
        has_mlp=True,
    ),
    "Nemotron-Nano-9B-v2": hybrid_decoder(
        decoder(
            4480,
            15_680,
            (40, 8),
            128,
            131_072,
            names=WeightNames(gate_up=("up_proj",), in_proj=("in_proj",)),
            gate="relu2",
        ),
        mamba2(128, 80, 8, 128),
        has_mlp=False,
    ),
    "Granite-4.0-H-Small": hybrid_decoder(
        decoder(
            4096,
            1536,
            (32, 8),
            128,
            100_352,
            names=WeightNames(in_proj=("in_proj",)),
            experts=Experts(72, 10, 768, shared_intermediate_size=1536),
        ),
        mamba2(128, 64, 1, 128),
        has_mlp=True,
    ),
    "gpt-oss-20b": decoder(
        2880,
        2880,
        (64, 8),
        64,
        201_088,
        gate=Gate(alpha=1.702, limit=7.0, beta=1.0),
        window=128,
        has_sinks=True,
        experts=Experts(32, 4, 2880, "softmax_chosen", has_biases=True),
        qkv_bias=True,
        o_proj_bias=True,
        names=WeightNames(router="router", stacked_experts="interleaved"),
    ),
}


@contextmanager
def without_memory() -> Iterator[None]:
    """Let tensors of no memory be served as those of a GPU are."""
    backends.TRITON_TYPES.add(META.type)
    try:
        yield
    finally:
        backends.TRITON_TYPES.remove(META.type)


def fp8_rows(weight: Tensor) -> Quantised:
    """Return an fp8 weight of the same shape `[…, O, I]`, a scale a row."""
    return _fp8(weight, weight.shape[-1])


def fp8_blocks(weight: Tensor) -> Quantised:
    """Return an fp8 weight of the same shape `[…, O, I]`, a scale for 128 inputs."""
    return _fp8(weight, BLOCK)


def int4_groups(weight: Tensor) -> Quantised:
    """Return an int4 weight of the same shape `[…, O, I]`, scale and zero for 128 inputs."""
    *outputs, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    words = weight.new_empty(*outputs, blocks * WORDS_A_BLOCK, dtype=torch.int32)
    scales = weight.new_empty(*outputs, blocks, dtype=torch.float32)
    zeros = weight.new_empty(*outputs, blocks, dtype=torch.uint8)
    return Quantised(words, scales, zeros, inputs, BLOCK, weight.dtype)


def mxfp4_experts(weight: Tensor) -> Matrix:
    """Return experts `[E, O, I]` in fp4, a scale for 32 inputs; other weights stay as they are."""
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
# What quantised models come in most.
QUANTISATIONS: tuple[Quantise, ...] = (fp8_rows, fp8_blocks, int4_groups)


def quantisations_of(architecture: Architecture) -> tuple[Quantise, ...]:
    """Return what a model's weights may be quantised to: GPT-OSS is published in mxfp4."""
    experts = architecture.blocks[0].experts
    of_gpt_oss = experts is not None and experts.has_biases
    return (*QUANTISATIONS, mxfp4_experts) if of_gpt_oss else QUANTISATIONS


def make_meta_decoder(
    architecture: Architecture,
    dtype: torch.dtype,
    kept: torch.dtype | None = None,
    quantise: Quantise | None = None,
) -> tuple[Decoder, AttentionBackend]:
    """Return a decoder without numbers, and its attention over one page, in a dtype of its own.

    Its linear layers' weights are those of `quantise`, and so are its experts'.
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
    """Return a step of spans, the last of whose tokens are asked for; all lie on the first page."""
    contexts, lengths = np.array(list(spans)).T
    query_starts = np.concatenate([[0], lengths.cumsum()])
    counts = -(-(contexts + lengths) // page_size)
    return Step.pack(
        int((lengths == 1).sum()),
        META,
        token_ids=np.zeros(query_starts[-1], np.int64),
        positions=np.concatenate(
            [
                np.arange(first, first + length)
                for first, length in zip(contexts, lengths, strict=True)
            ]
        ),
        slots=np.zeros(query_starts[-1], np.int64),
        query_starts=query_starts,
        context_lengths=contexts,
        page_starts=np.concatenate([[0], counts.cumsum()]),
        pages=np.zeros(counts.sum(), np.int64),
        logit_rows=query_starts[1:] - 1,
        state_sources=np.zeros(len(lengths), np.int64),
        state_rows=np.zeros(len(lengths), np.int64),
    )


def mixed_metadata(count: int, vocabulary: int) -> SamplingMetadata:
    """Return rules by which every other row is greedy, and the rest are all that rows may be."""
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
    """Compile what models ask for on an architecture such as 90, in each dtype they may run in."""
    with compile_only(arch), without_memory():
        for architecture in models:
            for dtype in DTYPES:
                run(architecture, dtype)
            run(architecture, DTYPES[0], FP8)
            for quantise in quantisations_of(architecture):
                run(architecture, DTYPES[0], quantise=quantise)


def main(architectures: Sequence[int]) -> int:
    """Compile everything, each architecture in a process of its own; return the exit status."""
    compile_module()
    # A fresh start of each: what torch and Triton hold does not outlive a fork.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for done in [
            pool.submit(compile_for, arch)
            for arch in architectures
            for compile_for in (compile_all, of_kernels.compile_all)
        ]:
            done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main([int(asked) for asked in sys.argv[1:]]))
