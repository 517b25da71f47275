"""Every kernel compiled for an architecture, in the forms that differ by more than a model's sizes.

No card is needed. What is made lies where TRITON_CACHE_DIR says. An image brings this, and what
models of usual shapes ask for besides: `engine.model.beforehand`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from engine.kernels.attention import AttentionShape, HeadNorms
from engine.kernels.blocks import Gate
from engine.kernels.pooling import Segments
from engine.kernels.quantised import FP8, Quantised
from engine.kernels.sampling import nothing_asked
from engine.kernels.step import Step
from engine.kernels.triton import blocks, entry, experts, fp8, pooling, products, sampling
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.launching import compiling_for

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16)
HIDDEN, HEAD_DIM, PAGE_SIZE, VOCABULARY = 4096, 128, 16, 128_000


def norms(dtype: torch.dtype) -> None:
    """Call each norm, with weights of the model's dtype and with widened ones."""
    x = torch.empty(2, HIDDEN, dtype=dtype)
    for kind in (dtype, torch.float32):
        weight = torch.empty(HIDDEN, dtype=kind)
        blocks.rms_norm(x, weight, 1e-6)
        blocks.add_rms_norm(x, x, weight, 1e-6)
        blocks.layer_norm(x, weight, weight, 1e-6)
        blocks.add_layer_norm(x, x, weight, weight, 1e-6)


def gates(dtype: torch.dtype) -> None:
    """Call each gate: every curve, and gpt-oss' limit."""
    both = torch.empty(2, 2 * HIDDEN, dtype=dtype)
    of_gpt_oss = Gate(steepness=1.702, limit=7.0, lift=1.0)
    for gate in (Gate(), Gate("gelu"), Gate("gelu_tanh"), of_gpt_oss):
        blocks.gated(both, gate)


def entries(dtype: torch.dtype) -> None:
    """Store heads in pages of the model's dtype and of eight bits: as they are, turned, normed."""
    shape = AttentionShape(4, 2, HEAD_DIM, HEAD_DIM, 1.0)
    slots = torch.zeros(2, dtype=torch.int32)
    qkv, turns = torch.empty(2, 8 * HEAD_DIM, dtype=dtype), torch.empty(2, HEAD_DIM)
    weight = torch.empty(HEAD_DIM, dtype=dtype)
    key = torch.empty(2, 2, HEAD_DIM, dtype=dtype)
    for kind in (dtype, torch.float8_e4m3fn):
        pages = torch.empty(2, 2, PAGE_SIZE, HEAD_DIM, dtype=kind)
        for head_norms in (None, HeadNorms(weight, weight, 1e-6)):
            entry.enter(qkv, turns, head_norms, shape, slots, pages, pages)
        entry.store(key, key, slots, pages, pages)


def choices(dtype: torch.dtype) -> None:
    """Choose and score tokens of a vocabulary that is a multiple of 16."""
    logits = torch.empty(2, VOCABULARY, dtype=dtype)
    sampling.choose(logits, nothing_asked(2))
    sampling.log_probabilities(logits, np.arange(2), torch.zeros(2, dtype=torch.int64), 1)


# Query heads to a key head and their widths: of most models, and with all that few have.
HEADS = (
    AttentionShape(8, 1, 64, 64, 1.0, softcap=50.0, has_sinks=True),
    AttentionShape(4, 1, 128, 128, 1.0),
)


def attention(dtype: torch.dtype) -> None:
    """Call attention of each form; of a step of no tokens, as nothing else is different.

    The first form over keys and values of eight bits, too.
    """
    none = np.zeros(0, np.int32)
    names = ("token_ids", "positions", "slots", "context_lengths", "pages", "logit_rows")
    starts = {"query_starts": np.zeros(1, np.int32), "page_starts": np.zeros(1, np.int32)}
    step = Step.pack(0, CPU, **dict.fromkeys(names, none), **starts)
    for shape, kept in [*((shape, dtype) for shape in HEADS), (HEADS[0], FP8)]:
        backend = TritonAttention([shape], 0, kept, CPU)
        backend.prepare(step)
        sinks = torch.empty(shape.num_query_heads, dtype=dtype) if shape.has_sinks else None
        query = torch.empty(0, shape.num_query_heads, shape.key_dim, dtype=dtype)
        backend.attend(0, query, sinks)


def mixtures(dtype: torch.dtype) -> None:
    """Choose, sort and sum; multiply by large tiles and small, with biases and without."""
    count, chosen = 64, 8
    for how in (True, False):
        experts.choose(
            torch.empty(2, count, dtype=dtype), chosen, among_chosen=how, is_renormalised=how
        )
    ids = torch.zeros(2, chosen, dtype=torch.int32)
    rows = experts.sort(ids, count)
    weight = torch.empty(count, HEAD_DIM, HEAD_DIM, dtype=dtype)
    for num_rows in (2 * chosen, (experts.MANY_ROWS + 1) * count):
        x, tokens = torch.empty(num_rows, HEAD_DIM, dtype=dtype), torch.empty(num_rows).int()
        for bias in (None, weight[0]):
            for named in (None, tokens):
                experts.grouped(x, named, weight, bias, rows.stops)
    experts.combine(torch.empty(16, HIDDEN, dtype=dtype), rows.places, torch.empty(2, chosen))


def quantised(dtype: torch.dtype) -> None:
    """Multiply by weights of four bits, and of eight, which come with bf16: small and wide."""
    for outputs, sizes in ((HIDDEN, (32, 64, 128, HIDDEN)), (8 * HIDDEN, (128,))):
        words = torch.empty(outputs, HIDDEN // 8, dtype=torch.int32)
        numbers = torch.empty(outputs, HIDDEN, dtype=FP8)
        for group in sizes:
            scales = torch.empty(outputs, HIDDEN // group)
            zeros = torch.empty_like(scales, dtype=torch.uint8)
            _multiplied(Quantised(words, scales, zeros, HIDDEN, group, dtype))
            if dtype == torch.bfloat16 and group >= 128:
                _multiplied(Quantised(numbers, scales, None, HIDDEN, group, dtype))
    count = 64  # experts, whose groups are large
    scales = torch.empty(count, HEAD_DIM, HIDDEN // 128)
    zeros, words = torch.empty_like(scales, dtype=torch.uint8), words[: count * HEAD_DIM]
    numbers, ends = numbers[: count * HEAD_DIM], torch.empty(count, dtype=torch.int32)
    x, tokens = torch.empty(8, HIDDEN, dtype=dtype), torch.empty(8, dtype=torch.int32)
    for stored, zero in ((words, zeros), *([(numbers, None)] if dtype == torch.bfloat16 else [])):
        stacked = stored.view(count, HEAD_DIM, -1)
        weight = Quantised(stacked, scales, zero, HIDDEN, 128, dtype)
        for named in (None, tokens):
            experts.grouped_few_bits(x, named, weight, ends)


def _multiplied(weight: Quantised) -> None:
    """Multiply few rows and many, with a bias and without."""
    products.dequantised(weight)
    x = torch.empty(128, HIDDEN, dtype=weight.dtype)
    for bias in (None, torch.empty(weight.shape[0], dtype=weight.dtype)):
        for rows in (16, 64, 128):
            if weight.zeros is None and fp8.multiplies_fp8(CPU):
                fp8.multiply(x[:rows], weight, bias)
            elif rows <= products.FEW_ROWS:
                products.multiply(x[:rows], weight, bias)


def vectors(dtype: torch.dtype) -> None:
    """Pool by each mode, alone and beside another, and bring to length 1."""
    starts = torch.tensor([0, 1])
    for mode in pooling.MODES:
        hidden = torch.empty(1, HIDDEN, dtype=dtype)
        pooling.pool(hidden, Segments(starts, starts[:1]), (mode, mode))
    pooling.unit(torch.empty(1, HIDDEN))


# Each calls what a run calls, in the forms that it may call it in.
CALLS: tuple[Callable[[torch.dtype], None], ...] = (
    norms,
    gates,
    entries,
    choices,
    attention,
    mixtures,
    quantised,
    vectors,
)


def compile_all(arch: int, dtypes: Iterable[torch.dtype] = DTYPES) -> None:
    """Compile every kernel for an architecture, in each dtype that models are served in."""
    with compiling_for(arch):
        for dtype in dtypes:
            for call in CALLS:
                call(dtype)
