"""Ahead-of-time compilation (precompile) of every Triton kernel for a GPU architecture.

Covers the variants that do not depend on a model's sizes; `engine.model.compile_kernels` adds those
of common models. No GPU is needed. The output goes to TRITON_CACHE_DIR, and into the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from ..attention import AttentionShape, HeadNorms
from ..elementwise import Gate
from ..pooling import Segments
from ..quantised import FP8, Quantised
from ..recurrence import GatedDelta, RecurrentShape, RuleWeights, StateSpace
from ..sampling import greedy_metadata
from ..step import Step
from . import elementwise, experts, fp8, grouped_gemm, linear, pooling, sampling
from . import qkv as qkv_kernels
from .attention import TritonAttention
from .latent import TritonLatentAttention
from .launch import compile_only
from .recurrence import TritonRecurrence

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16)
HIDDEN, HEAD_DIM, PAGE_SIZE, VOCABULARY = 4096, 128, 16, 128_000
SILU, OF_GPT_OSS = Gate(), Gate(alpha=1.702, limit=7.0, beta=1.0)
# Average rows of an expert, one of each class that has separate tiles.
AVERAGES = (8, 16, 32, 64, 128)


# Inputs that share a scale in fp8: a block's, and a row's.
FP8_GROUPS = (128, HIDDEN)


def norms(dtype: torch.dtype) -> None:
    """Call each norm, with weights of the model's dtype and with widened ones, and into fp8."""
    x = torch.empty(2, HIDDEN, dtype=dtype)
    for kind in (dtype, torch.float32):
        weight = torch.empty(HIDDEN, dtype=kind)
        elementwise.rms_norm(x, weight, 1e-6)
        elementwise.add_rms_norm(x, x, weight, 1e-6)
        elementwise.layer_norm(x, weight, weight, 1e-6)
        elementwise.add_layer_norm(x, x, weight, weight, 1e-6)
        for group in FP8_GROUPS if fp8.has_fp8_matmul(CPU) else ():
            elementwise.add_rms_norm_fp8(None, x, weight, 1e-6, group)
            elementwise.add_rms_norm_fp8(x, x, weight, 1e-6, group)


def gates(dtype: torch.dtype) -> None:
    """Call each gate: every activation, and gpt-oss' limit; into fp8, too."""
    both = torch.empty(2, 2 * HIDDEN, dtype=dtype)
    for gate in (SILU, Gate("gelu"), Gate("gelu_tanh"), OF_GPT_OSS):
        elementwise.act_and_mul(both, gate)
        for group in FP8_GROUPS if fp8.has_fp8_matmul(CPU) else ():
            elementwise.act_and_mul_fp8(both, gate, group)


def qkv_stores(dtype: torch.dtype) -> None:
    """Store heads in pages of the model's dtype and of fp8: plain, rotated, normed."""
    shape = AttentionShape(4, 2, HEAD_DIM, HEAD_DIM, 1.0)
    slots = torch.zeros(2, dtype=torch.int32)
    qkv, cos_sin = torch.empty(2, 8 * HEAD_DIM, dtype=dtype), torch.empty(2, HEAD_DIM)
    weight = torch.empty(HEAD_DIM, dtype=dtype)
    key = torch.empty(2, 2, HEAD_DIM, dtype=dtype)
    for kind in (dtype, torch.float8_e4m3fn):
        pages = torch.empty(2, 2, PAGE_SIZE, HEAD_DIM, dtype=kind)
        for head_norms in (None, HeadNorms(weight, weight, 1e-6)):
            qkv_kernels.store_qkv(qkv, cos_sin, head_norms, shape, slots, pages, pages)
        qkv_kernels.store_kv(key, key, slots, pages, pages)


def sampling_calls(dtype: torch.dtype) -> None:
    """Sample and score tokens of a vocabulary that is a multiple of 16."""
    logits = torch.empty(2, VOCABULARY, dtype=dtype)
    sampling.sample(logits, greedy_metadata(2))
    sampling.compute_logprobs(logits, np.arange(2), torch.zeros(2, dtype=torch.int64), 1)


# Query heads to a key head and their widths: one with every rare feature, and the common one.
HEADS = (
    AttentionShape(8, 1, 64, 64, 1.0, softcap=50.0, has_sinks=True),
    AttentionShape(4, 1, 128, 128, 1.0),
)


def attention(dtype: torch.dtype) -> None:
    """Call each variant of attention, on a step without tokens, as kernels do not depend on them.

    The first variant is called with an fp8 KV cache, too.
    """
    step = _empty_step()
    for shape, kept in [*((shape, dtype) for shape in HEADS), (HEADS[0], FP8)]:
        backend = TritonAttention([shape], 0, kept, CPU)
        backend.prepare(step)
        sinks = torch.empty(shape.num_query_heads, dtype=dtype) if shape.has_sinks else None
        query = torch.empty(0, shape.num_query_heads, shape.key_dim, dtype=dtype)
        backend.attend(0, query, sinks)


# Shapes of DeepSeek V2 Lite, and of V3 on one of eight cards.
LATENTS = AttentionShape(16, 1, 576, 512, 1.0, has_latent_values=True)


def latents(dtype: torch.dtype) -> None:
    """Call latent attention (MLA) on a step without tokens, in bf16 and fp8."""
    shape = LATENTS
    for kept in (dtype, FP8) if dtype == torch.bfloat16 else (dtype,):
        backend = TritonLatentAttention([shape], 0, kept, CPU)
        backend.prepare(_empty_step())
        query = torch.empty(0, shape.num_query_heads, shape.key_dim, dtype=dtype)
        backend.attend(0, query)
        backend.store(0, query[:, :1], query[:, :1])


# Shapes of Qwen3-Next, Granite 4 H and the largest Falcon-H1.
RULES = (GatedDelta(16, 32, 128, 128), StateSpace(128, 64, 1, 128), StateSpace(32, 128, 1, 256))


def recurrences(dtype: torch.dtype) -> None:
    """Call convolution, rule and gated norm for a span of one token and one of two."""
    rows, starts = torch.zeros(2).int(), torch.tensor([0, 1, 3]).int()
    step = replace(_empty_step(), query_starts=starts, state_sources=rows, state_rows=rows)
    for rule in RULES:
        shape = RecurrentShape(sum(rule.widths), 4, rule=rule)
        backend, heads = TritonRecurrence([shape], 0, dtype, CPU), rule.state_shape[0]
        backend.prepare(step)
        x = torch.empty(3, shape.num_channels, dtype=dtype)
        weights = RuleWeights(*torch.empty(3, heads).unbind())
        gates = torch.empty(3, heads, dtype=dtype)
        mixed = backend.convolve(0, x, torch.empty(shape.num_channels, 4, dtype=dtype), None)
        if isinstance(rule, GatedDelta):
            out, groups = backend.apply_delta_rule(0, mixed, gates, gates, weights), heads
        else:
            out, groups = backend.scan(0, mixed, gates, weights), rule.num_groups
        flat, is_first = out.flatten(1), isinstance(rule, GatedDelta)
        norm = torch.empty(flat.shape[1] // groups, dtype=dtype)
        backend.gate_and_norm(flat, flat, norm, groups, 1e-6, is_norm_first=is_first)


def _empty_step() -> Step:
    none = np.zeros(0, np.int32)
    names = ("token_ids", "positions", "slots", "context_lengths", "pages", "logit_rows")
    starts = {"query_starts": np.zeros(1, np.int32), "page_starts": np.zeros(1, np.int32)}
    return Step.pack(0, CPU, **dict.fromkeys(names, none), **starts)


def mixtures(dtype: torch.dtype) -> None:
    """Call the MoE kernels: routing, sort, combine, and products by the tiles of all sizes."""
    count, chosen = 64, 8
    for how in (True, False):
        experts.select_experts(
            torch.empty(2, count, dtype=dtype), chosen, among_chosen=how, is_renormalised=how
        )
    ids = torch.zeros(2, chosen, dtype=torch.int32)
    rows = experts.sort_by_expert(ids, count)
    weight = torch.empty(count, HEAD_DIM, HEAD_DIM, dtype=dtype)
    for average in AVERAGES:
        num_rows = average * count
        x, tokens = torch.empty(num_rows, HEAD_DIM, dtype=dtype), torch.empty(num_rows).int()
        for gate, bias in ((SILU, None), (OF_GPT_OSS, weight[0])):
            grouped_gemm.grouped_linear(x, tokens, weight, bias, rows.stops, gate)
            grouped_gemm.grouped_linear(x, None, weight, bias, rows.stops)
    experts.combine_experts(
        torch.empty(16, HIDDEN, dtype=dtype), rows.places, torch.empty(2, chosen)
    )


def quantised(dtype: torch.dtype) -> None:
    """Multiply by int4 and NVFP4 weights, by fp4 ones of experts, and by fp8 ones of bf16."""
    for outputs, sizes in ((HIDDEN, (32, 64, 128, HIDDEN)), (8 * HIDDEN, (128,))):
        words = torch.empty(outputs, HIDDEN // 8, dtype=torch.int32)
        numbers = torch.empty(outputs, HIDDEN, dtype=FP8)
        for group in sizes:
            scales = torch.empty(outputs, HIDDEN // group)
            zeros = torch.empty_like(scales, dtype=torch.uint8)
            _multiplied(Quantised(words, scales, zeros, HIDDEN, group, dtype))
            if dtype == torch.bfloat16 and group >= 128:
                _multiplied(Quantised(numbers, scales, None, HIDDEN, group, dtype))
        _multiplied(_nvfp4(words, HIDDEN, dtype))
    count = 64  # experts, whose groups are large
    scales = torch.empty(count, HEAD_DIM, HIDDEN // 128)
    zeros, words = torch.empty_like(scales, dtype=torch.uint8), words[: count * HEAD_DIM]
    numbers, ends = numbers[: count * HEAD_DIM], torch.empty(count, dtype=torch.int32)
    x, tokens = torch.empty(8, HIDDEN, dtype=dtype), torch.empty(8, dtype=torch.int32)
    powers = torch.empty(count, HEAD_DIM, HIDDEN // 32, dtype=torch.uint8)
    stacked = words.view(count, HEAD_DIM, -1)
    four = Quantised(stacked, scales, zeros, HIDDEN, 128, dtype)
    weights = [four, replace(four, scales=powers, zeros=None, group=32)]
    weights.append(_nvfp4(stacked, HIDDEN, dtype))
    if dtype == torch.bfloat16:
        numbers = numbers.view(count, HEAD_DIM, -1)
        weights.append(replace(four, numbers=numbers, zeros=None))
    for weight in weights:
        linear.dequantised(weight)
        for gate, named in ((SILU, tokens), (None, None)):
            if grouped_gemm.supports_fp8(weight):
                rows = elementwise.quantise_fp8(x, weight.group)
                grouped_gemm.grouped_fp8(rows, named, weight, None, ends, gate)
            else:
                grouped_gemm.grouped_quantised(x, named, weight, None, ends, gate)


def _nvfp4(words: torch.Tensor, inputs: int, dtype: torch.dtype) -> Quantised:
    """Return a weight of fp4 words with a scale per 16 inputs and one per row."""
    scales = torch.empty(*words.shape[:-1], inputs // 16, dtype=FP8)
    rows = torch.empty(*words.shape[:-1], 1)
    return Quantised(words, scales, None, inputs, 16, dtype, row_scales=rows)


def _multiplied(weight: Quantised) -> None:
    """Multiply few rows and many, with a bias and without."""
    linear.dequantised(weight)
    x = torch.empty(128, HIDDEN, dtype=weight.dtype)
    for bias in (None, torch.empty(weight.shape[0], dtype=weight.dtype)):
        for rows in (16, 64, 128):
            if weight.is_fp8 and fp8.has_fp8_matmul(CPU):
                activations = elementwise.quantise_fp8(x[:rows], weight.group)
                scalings: tuple[fp8.Scaling, ...] = ("group", "block")
                for scaling in scalings if weight.group < HIDDEN else ("row",):
                    given = fp8.Fp8Weight(weight.numbers, weight.scales, scaling, weight.group)
                    fp8.multiply(activations, given, bias)
            elif rows <= linear.most_rows(weight):
                linear.multiply(x[:rows], weight, bias)


def pooling_calls(dtype: torch.dtype) -> None:
    """Pool by each mode, alone and with another, and normalise."""
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for mode in pooling.MODES:
        hidden = torch.empty(1, HIDDEN, dtype=dtype)
        pooling.pool(hidden, Segments(starts, starts[:1]), (mode, mode))
    pooling.normalise(torch.empty(1, HIDDEN))


# Each calls kernels as a run does, in all variants.
CALLS: tuple[Callable[[torch.dtype], None], ...] = (
    norms,
    gates,
    qkv_stores,
    sampling_calls,
    attention,
    latents,
    recurrences,
    mixtures,
    quantised,
    pooling_calls,
)


def compile_all(arch: int, dtypes: Iterable[torch.dtype] = DTYPES) -> None:
    """Compile every kernel for an architecture, in each dtype that models are served in."""
    with compile_only(arch):
        for dtype in dtypes:
            for call in CALLS:
                call(dtype)
