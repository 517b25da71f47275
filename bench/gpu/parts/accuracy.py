"""Every kernel against its reference in float64, on shapes that end within a block or beyond."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.gpu.parts.steps import PagedSequences, Piece, sampling_metadata
from bench.gpu.parts.task import Numbers, Place, Task
from tidemill.engine.kernels import elementwise as plain_blocks
from tidemill.engine.kernels import pooling as plain_pooling
from tidemill.engine.kernels import sampling as plain_sampling
from tidemill.engine.kernels.attention import AttentionShape, HeadNorms
from tidemill.engine.kernels.backends import (
    choose_backend,
    choose_elementwise,
    choose_experts,
    choose_linear,
    choose_pooling,
    choose_recurrence,
    choose_sampling,
)
from tidemill.engine.kernels.elementwise import Gate, act_and_mul
from tidemill.engine.kernels.experts import ExpertWeights
from tidemill.engine.kernels.latent import LatentAttention, LatentBackend, UpProjections
from tidemill.engine.kernels.pooling import Segments
from tidemill.engine.kernels.quantised import (
    FP8,
    FP8_MAX,
    Matrix,
    Quantised,
    as_tensor,
    pack_int4,
    quantise_fp8,
)
from tidemill.engine.kernels.recurrence import (
    GatedDelta,
    RecurrentShape,
    ReferenceRecurrence,
    RuleWeights,
    StateSpace,
)
from tidemill.engine.kernels.reference import ReferenceAttention

WIDTHS = (64, 100, 1024, 4096, 8192)
GATES = {
    "silu": Gate("silu"),
    "gelu_tanh": Gate("gelu_tanh"),
    "gelu": Gate("gelu"),
    "gpt-oss": Gate(alpha=1.702, limit=7.0, beta=1.0),
}
SHAPES = {
    "8B": AttentionShape(32, 8, 128, 128, 128**-0.5),
    "0.6B": AttentionShape(16, 8, 128, 128, 128**-0.5),
    "1B": AttentionShape(32, 8, 64, 64, 64**-0.5),
    "seven heads of 96 a key head": AttentionShape(14, 2, 96, 96, 96**-0.5),
    "gemma 2": AttentionShape(8, 4, 256, 256, 0.0625, window=40, softcap=50.0),
    "gpt-oss": AttentionShape(64, 8, 64, 64, 0.125, window=128, has_sinks=True),
    "one key head": AttentionShape(16, 1, 64, 64, 0.125),
}
OF_LATENTS = AttentionShape(16, 1, 576, 512, 0.1, has_latent_values=True)
TINY_SHAPES = {
    "grouped": AttentionShape(4, 2, 16, 16, 0.25),
    "window": AttentionShape(2, 1, 16, 16, 0.25, window=5, softcap=5.0, has_sinks=True),
}
# Latent attention (MLA), with the widths of a head's key, without its rotary part, and value.
Latents = tuple[AttentionShape, int, int]
LATENTS: dict[str, Latents] = {
    "deepseek v2 lite": (OF_LATENTS, 128, 128),
    "deepseek v3": (replace(OF_LATENTS, num_query_heads=128), 128, 128),
    "glm 4.7 flash": (replace(OF_LATENTS, num_query_heads=20), 192, 256),
}
TINY_LATENTS: dict[str, Latents] = {
    "tiny": (AttentionShape(4, 1, 48, 32, 0.2, has_latent_values=True), 8, 12)
}
RULES: dict[str, GatedDelta | StateSpace] = {
    "qwen3-next": GatedDelta(16, 32, 128, 128),
    "granite 4 h": StateSpace(128, 64, 1, 128),
    "nemotron nano": StateSpace(128, 80, 8, 128),
    "falcon-h1": StateSpace(32, 128, 1, 256),
}
TINY_RULES: dict[str, GatedDelta | StateSpace] = {
    "delta": GatedDelta(1, 2, 12, 20),
    "space": StateSpace(4, 12, 2, 10),
}
VOCABULARY = 32_000
# Allowed errors of numbers rounded once, and of sums of rounded numbers, in units of the dtype's
# precision.
NEAR, FAR = 4, 32
# Effect of rounding rows to fp8 on a product, as a share of it: each number is off by a 32nd.
FP8_BOUND = 0.04


def tasks(place: Place) -> Iterator[Task]:
    """Yield norms, gates, attention, choices, experts and pooling in each dtype."""
    for dtype in place.dtypes:
        name = str(dtype).removeprefix("torch.")
        yield Task(f"norms, {name}", partial(norms, place, dtype))
        for kind, gate in GATES.items():
            yield Task(f"gate {kind}, {name}", partial(gates, place, dtype, gate))
        shapes = TINY_SHAPES if place.is_tiny else SHAPES
        for kind, shape in shapes.items():
            yield Task(f"attention {kind}, {name}", partial(attention, place, dtype, shape))
        for kind, latents in (TINY_LATENTS if place.is_tiny else LATENTS).items():
            yield Task(f"latents {kind}, {name}", partial(latent_attention, place, dtype, *latents))
        for kind, rule in (TINY_RULES if place.is_tiny else RULES).items():
            yield Task(f"recurrence {kind}, {name}", partial(recurrence, place, dtype, rule))
        yield Task(f"choice, {name}", partial(choices, place, dtype))
        yield Task(f"log-probabilities, {name}", partial(scores, place, dtype))
        for width in (352, 353):
            yield Task(f"experts of {width}, {name}", partial(experts, place, dtype, width))
        yield Task(f"pooling, {name}", partial(pooling, place, dtype))
        yield Task(f"fp8 product, {name}", partial(fp8_products, place, dtype))
        yield Task(f"fp8 product in blocks, {name}", partial(fp8_block_products, place, dtype))
        yield Task(f"4-bit product, {name}", partial(four_bit_products, place, dtype))
        for form in ("fp8", "4-bit"):
            called = f"experts in {form}, {name}"
            yield Task(called, partial(quantised_experts, place, dtype, form))


def held(pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, units: float) -> Numbers:
    """Return the difference of a result from the expected one, and whether it passes.

    A number may differ by a multiple of its unit, or of the unit of the mean of all.
    """
    unit = torch.finfo(dtype).eps
    worst = 0.0
    for got, expected in pairs:
        scale = expected.abs().clamp(min=float(expected.square().mean().sqrt()) + 1e-30)
        off = ((got.double() - expected).abs() / scale).nan_to_num(torch.inf)
        worst = max(worst, float(off.max()) / unit)
    return {"units_off": worst, "bound": units, "holds": worst <= units}


def norms(place: Place, dtype: torch.dtype) -> Numbers:
    """All norms at all widths, of the dtype's weights and of fp32 ones (Gemma's)."""
    blocks, pairs = choose_elementwise(dtype, place.device), []
    for width in WIDTHS[: 2 if place.is_tiny else None]:
        x, other, stored, bias = torch.randn(4, 7, width, device=place.device).to(dtype)
        stored, bias = stored[0], bias[0]
        for offset in (0.0, 1.0):
            weight, wide = blocks.norm_weight(stored, offset), stored.double() + offset
            expected = plain_blocks.rms_norm(x.double(), wide, 1e-6)
            pairs.append((blocks.rms_norm(x, weight, 1e-6), expected))
            residual = other.clone()
            got = blocks.add_rms_norm(x, residual, weight, 1e-6)
            total = x.double() + other.double()
            pairs.append((got, plain_blocks.rms_norm(total, wide, 1e-6)))
            pairs.append((residual, total))
        shift = blocks.norm_weight(bias, 0.0)
        got = blocks.layer_norm(x, blocks.norm_weight(stored, 0.0), shift, 1e-6)
        wide = plain_blocks.layer_norm(x.double(), stored.double(), bias.double(), 1e-6)
        pairs.append((got, wide))
    return held(pairs, dtype, NEAR)


def gates(place: Place, dtype: torch.dtype, gate: Gate) -> Numbers:
    """One way of joining halves, at all widths."""
    blocks = choose_elementwise(dtype, place.device)
    pairs = []
    for width in WIDTHS[: 2 if place.is_tiny else None]:
        both = 3 * torch.randn(5, 2 * width, device=place.device).to(dtype)
        pairs.append((blocks.act_and_mul(both, gate), act_and_mul(both.double(), gate)))
    return held(pairs, dtype, NEAR)


def attention(place: Place, dtype: torch.dtype, shape: AttentionShape) -> Numbers:
    """Chunks, then decodes and chunks after them, with heads normed and rotated."""
    size = 1 if place.is_tiny else 20
    first, last = 16 + 16 * size, 16 + 30 * size
    sequences = PagedSequences([16 + 7 * size, last, 32, 17, 49], shared=16)
    rounds = (
        [Piece(0, 0, 16 + 7 * size)],  # the shared prefix is stored once
        [Piece(1, 16, first), Piece(2, 16, 31), Piece(4, 16, 32)],
        [Piece(2, 31, 32), Piece(3, 16, 17), Piece(1, first, last - 1), Piece(4, 32, 48)],
        [Piece(1, last - 1, last), Piece(4, 48, 49)],
    )
    own = choose_backend([shape], dtype, place.device)
    backends = [
        own([shape], sequences.num_pages(own.page_size), dtype, place.device),
        ReferenceAttention(
            [shape], sequences.num_pages(ReferenceAttention.page_size), torch.float64, place.device
        ),
    ]
    blocks = choose_elementwise(dtype, place.device)
    weights = torch.randn(2, shape.key_dim, device=place.device).to(dtype)
    sinks = torch.randn(shape.num_query_heads, device=place.device).to(dtype)
    pairs = []
    for pieces in rounds:
        num_tokens = sum(piece.stop - piece.start for piece in pieces)
        heads = shape.num_query_heads + 2 * shape.num_kv_heads
        qkv = torch.randn(num_tokens, heads * shape.key_dim, device=place.device).to(dtype)
        angles = torch.randn(num_tokens, shape.key_dim // 2, device=place.device)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        outs = []
        for backend, to in zip(backends, (dtype, torch.float64), strict=True):
            wanted = blocks.norm_weight if to is dtype else plain_blocks.norm_weight
            of_query, of_key = (wanted(one.to(to), 0.0) for one in weights)
            backend.prepare(sequences.step(pieces, backend.page_size, place.device))
            angle = cos_sin if to is dtype else cos_sin.double()
            query = backend.store_qkv(0, qkv.to(to), angle, HeadNorms(of_query, of_key, 1e-6))
            layer_sinks = sinks.to(to) if shape.has_sinks else None
            outs.append((query, backend.attend(0, query, layer_sinks)))
        pairs += list(zip(*outs, strict=True))
    return held(pairs, dtype, FAR)


def latent_attention(
    place: Place, dtype: torch.dtype, shape: AttentionShape, nope: int, width: int
) -> Numbers:
    """Expanded chunks and others, then decodes with such chunks, some with shared prefixes."""
    size = 1 if place.is_tiny else 20
    long = 64 + 30 * size
    sequences = PagedSequences([140, long, 97, 98], shared=64)
    rounds = (
        [Piece(0, 0, 139)],  # the shared prefix is stored once
        [Piece(0, 139, 140), Piece(1, 64, long - 2), Piece(2, 64, 96), Piece(3, 64, 95)],
        [Piece(1, long - 2, long - 1), Piece(2, 96, 97), Piece(3, 95, 98)],
        [Piece(1, long - 1, long), Piece(0, 139, 140), Piece(2, 96, 97)],
    )
    backends = [
        kind([shape], sequences.num_pages(kind.page_size), to, place.device)
        for kind, to in (
            (choose_backend([shape], dtype, place.device), dtype),
            (LatentAttention, torch.float64),
        )
    ]
    heads, rank = shape.num_query_heads, shape.value_dim
    weights = [torch.randn(heads, wide, rank, device=place.device) for wide in (nope, width)]
    weights = [(weight * rank**-0.5).to(dtype) for weight in weights]
    pairs = []
    for pieces in rounds:
        count = sum(piece.stop - piece.start for piece in pieces)
        query = torch.randn(count, heads, nope, device=place.device).to(dtype)
        rotary = torch.randn(count, heads, shape.key_dim - rank, device=place.device).to(dtype)
        stored = torch.randn(count, 1, shape.key_dim, device=place.device).to(dtype)
        outs = []
        for backend, to in zip(backends, (dtype, torch.float64), strict=True):
            assert isinstance(backend, LatentBackend)
            backend.prepare(sequences.step(pieces, backend.page_size, place.device))
            backend.store(0, stored.to(to), stored.to(to))
            projections = UpProjections(*(weight.to(to) for weight in weights))
            outs.append(backend.attend_latents(0, query.to(to), rotary.to(to), projections))
        pairs.append((outs[0], outs[1]))
    return held(pairs, dtype, FAR)


def recurrence(place: Place, dtype: torch.dtype, rule: GatedDelta | StateSpace) -> Numbers:
    """Chunks from zeros, then decodes with chunks, from rows: convolution, rule, gated norm.

    The input of a layer's later kernels is the reference's output of the earlier ones. Its own
    sums are fp32, so that the allowed error in fp32 is four times as large.
    """
    size, device, heads = 1 if place.is_tiny else 8, place.device, rule.state_shape[0]
    shape = RecurrentShape(sum(rule.widths), 4, rule=rule)
    sequences = PagedSequences([64 * size + 1, 34, 5])
    rounds = (
        [Piece(0, 0, 64 * size), Piece(1, 0, 31)],
        [Piece(0, 64 * size, 64 * size + 1), Piece(1, 31, 34), Piece(2, 0, 5)],
    )
    kinds = choose_recurrence([shape], dtype, device), ReferenceRecurrence
    own, plain = (kind([shape], len(sequences.lengths), dtype, device) for kind in kinds)
    taps = torch.randn(shape.num_channels, 4, device=device).to(dtype)
    weights = RuleWeights(*torch.randn(3, heads, device=device).unbind())
    width = rule.value_dim if isinstance(rule, GatedDelta) else rule.head_dim
    norm = torch.randn(width, device=device).to(dtype)
    pairs = []
    for pieces in rounds:
        count = sum(piece.stop - piece.start for piece in pieces)
        # Halved: fp16 ends at 65504, and a gated number is a product of three.
        x = torch.randn(count, shape.num_channels, device=device).to(dtype) / 2
        a, b = torch.randn(2, count, heads, device=device).to(dtype).unbind()
        for backend in (own, plain):
            backend.prepare(sequences.step(pieces, 16, device))
        convolved = [each.convolve(0, x, taps, taps[:, 0].contiguous()) for each in (own, plain)]
        if isinstance(rule, GatedDelta):
            mixed = [each.apply_delta_rule(0, convolved[1], a, b, weights) for each in (own, plain)]
        else:
            mixed = [each.scan(0, convolved[1], a, weights) for each in (own, plain)]
        flat = mixed[1].flatten(1)
        gated = [
            each.gate_and_norm(flat, flat, norm, heads, 1e-6, is_norm_first=True)
            for each in (own, plain)
        ]
        pairs += [(one, other.double()) for one, other in (convolved, mixed, gated)]
    return held(pairs, dtype, 4 * FAR if dtype == torch.float32 else FAR)


def choices(place: Place, dtype: torch.dtype) -> Numbers:
    """Greedy rows, drawn and shaped ones: the same tokens as in torch."""
    count, vocabulary = (6, 300) if place.is_tiny else (64, VOCABULARY)
    logits = (4 * torch.randn(count, vocabulary, device=place.device)).to(dtype)
    metadata = sampling_metadata(count, vocabulary, is_mixed=True)
    own = choose_sampling(dtype, place.device).sample(logits, metadata)
    plain = plain_sampling.sample(logits, metadata)
    logits[1, vocabulary // 2] = torch.nan
    broken = choose_sampling(dtype, place.device).sample(logits, metadata).is_broken
    others = int((own.token_ids != plain.token_ids).sum())
    holds = not others and broken.nonzero().flatten().tolist() == [1]
    return {"rows": count, "other_tokens": others, "holds": holds}


def scores(place: Place, dtype: torch.dtype) -> Numbers:
    """Log-probabilities of tokens and of the likeliest in their places."""
    count, vocabulary = (4, 300) if place.is_tiny else (32, VOCABULARY)
    logits = (4 * torch.randn(count, vocabulary, device=place.device)).to(dtype)
    chosen = torch.arange(count, device=place.device) * 7
    own = choose_sampling(dtype, place.device)
    got = own.compute_logprobs(logits, np.arange(count), chosen, 5)
    wide = logits.double().log_softmax(-1)
    expected = wide.gather(1, chosen[:, None]).squeeze(1), wide.topk(5).values
    return held([(got.logprobs, expected[0]), (got.top_logprobs, expected[1])], torch.float32, FAR)


def experts(place: Place, dtype: torch.dtype, width: int) -> Numbers:
    """A mixture of more tokens than a tile has; rows of an odd width are not aligned."""
    count, inner = (4, 24) if place.is_tiny else (16, 200)
    hidden = width // 11 if place.is_tiny else width
    both = 0.1 * torch.randn(count, 2 * inner, hidden, device=place.device).to(dtype)
    down = 0.1 * torch.randn(count, hidden, inner, device=place.device).to(dtype)
    return held(mixed(place, both, down), dtype, FAR)


def quantised_experts(place: Place, dtype: torch.dtype, form: str) -> Numbers:
    """The same with quantised weights; errors are a share of the whole."""
    count, inner, hidden = (4, 64, 128) if place.is_tiny else (16, 256, 384)
    shapes = (count, 2 * inner, hidden), (count, hidden, inner)
    if form == "fp8":
        plain = (0.1 * torch.randn(shape, device=place.device).to(dtype) for shape in shapes)
        both, down = map(quantise_fp8, plain)
    else:
        both, down = (four_bits(place, dtype, *shape) for shape in shapes)
    (got, expected), _ = mixed(place, both, down)
    off = torch.linalg.vector_norm(got.double() - expected) / torch.linalg.vector_norm(expected)
    bound = 2 * FP8_BOUND if form == "fp8" else FAR * torch.finfo(dtype).eps
    return {"share_off": float(off), "bound": bound, "holds": float(off) <= bound}


def mixed(place: Place, both: Matrix, down: Matrix) -> list[tuple[Tensor, Tensor]]:
    """Return a mixture's outputs and routing weights, each with the expected ones."""
    count, hidden, _ = down.shape
    tokens, chosen = (5, 2) if place.is_tiny else (150, 4)
    dtype = both.dtype
    x = torch.randn(tokens, hidden, device=place.device).to(dtype)
    router = torch.randn(tokens, count, device=place.device).to(dtype)
    own = choose_experts(dtype, place.device)
    ids, shares = own.select_experts(router, chosen, among_chosen=False, is_renormalised=True)
    best = router.double().topk(chosen).values.softmax(-1)
    weights, gate = ExpertWeights(both, down, None, None), GATES["silu"]
    got = own.apply_experts(x, ids, shares, weights, gate, choose_elementwise(dtype, place.device))
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=place.device)
    ups, downs = as_tensor(both).double(), as_tensor(down).double()
    for expert in range(count):
        inside = act_and_mul(x.double() @ ups[expert].T, gate) @ downs[expert].T
        expected += inside * ((ids == expert) * shares.double()).sum(1)[:, None]
    return [(got, expected), (shares, best)]


def pooling(place: Place, dtype: torch.dtype) -> Numbers:
    """Each mode, of sequences that end within a tile and at its end, and vectors at length 1."""
    lengths = torch.tensor([1, 16, 17] if place.is_tiny else [1, 15, 16, 17, 500])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    segments = Segments(starts.to(place.device), (lengths - 1).to(place.device))
    on_host = Segments(starts, lengths - 1)
    hidden = torch.randn(int(starts[-1]), 100, device=place.device).to(dtype)
    own, pairs = choose_pooling(place.device), []
    for mode in ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"):
        wide = plain_pooling.pool(hidden.double().cpu(), on_host, [mode])
        pairs.append((own.pool(hidden, segments, [mode]), wide.to(place.device)))
    pooled = own.pool(hidden, segments, ["mean"])
    pairs.append((own.normalise(pooled), plain_pooling.normalise(pooled.double())))
    return held(pairs, torch.float32, FAR)


def fp8_products(place: Place, dtype: torch.dtype) -> Numbers:
    """Weights in fp8, and activations, too, on cards that multiply such numbers."""
    height, width = (48, 64) if place.is_tiny else (1024, 2048)
    weight = quantise_fp8(torch.randn(height, width, device=place.device).to(dtype))
    return multiplied(place, weight, FP8_BOUND)


def fp8_block_products(place: Place, dtype: torch.dtype) -> Numbers:
    """The same with one scale per 128 × 128 numbers."""
    height, width = (128, 256) if place.is_tiny else (1024, 2048)
    plain = torch.randn(height, width, device=place.device)
    blocks = plain.view(height // 128, 128, width // 128, 128)
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).repeat_interleave(128, 0)  # [O, I / 128]
    numbers = (plain / scales.repeat_interleave(128, 1)).to(FP8)
    weight = Quantised(numbers, scales, None, inputs=width, group=128, dtype=dtype)
    return multiplied(place, weight, FP8_BOUND)


def four_bit_products(place: Place, dtype: torch.dtype) -> Numbers:
    """Weights of four bits, with a scale and a zero per 64 inputs."""
    height, width = (48, 256) if place.is_tiny else (1024, 2048)
    return multiplied(place, four_bits(place, dtype, height, width), 4 * torch.finfo(dtype).eps)


def four_bits(place: Place, dtype: torch.dtype, *shape: int) -> Quantised:
    """Return random weights of four bits, in groups of 64 inputs."""
    groups = (*shape[:-1], shape[-1] // 64)
    numbers = torch.randint(0, 16, shape, device=place.device, dtype=torch.uint8)
    zeros = torch.randint(0, 16, groups, device=place.device, dtype=torch.uint8)
    scales = 0.1 * torch.rand(groups, device=place.device)
    return Quantised(pack_int4(numbers), scales, zeros, inputs=shape[-1], group=64, dtype=dtype)


def multiplied(place: Place, weight: Quantised, bound: float) -> Numbers:
    """Multiply few rows and many, by the kernel of either; errors are a share of the whole."""
    product = choose_linear(choose_elementwise(weight.dtype, place.device), place.device).make(
        weight
    )
    worst = 0.0
    for rows in (1, 5) if place.is_tiny else (1, 17, 300):
        x = torch.randn(rows, weight.inputs, device=place.device).to(weight.dtype)
        expected = x.double() @ weight.dequantised().double().T
        off = torch.linalg.vector_norm(product(x).double() - expected)
        worst = max(worst, float(off / torch.linalg.vector_norm(expected)))
    return {"share_off": worst, "bound": bound, "holds": worst <= bound}
