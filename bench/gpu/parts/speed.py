"""Speed of each kernel as a share of the card's ceilings, on the shapes of Llama-3-8B."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from bench.gpu.counts import Form, Spans, attention, entry
from bench.gpu.parts.steps import PagedSequences, Piece, sampling_metadata
from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.shapes import architecture
from tidemill.engine.kernels.backends import (
    choose_backend,
    choose_elementwise,
    choose_linear,
    choose_sampling,
)
from tidemill.engine.model.architecture import Architecture

# What is asked of decodes and of passes, as a share of a copy, and of 4,096 tokens on Hopper.
DECODE_BOUND = PASS_BOUND = 0.85
PREFILL_BOUND = 350e12
TOKENS = 8192
PRODUCT_ROWS = (1, 64, 256, 1024, 8192)


def tasks(place: Place) -> Iterator[Task]:
    """Yield attention, passes, products and choices."""
    model = architecture("tiny" if place.is_tiny else "llama-3-8b")
    tiny = place.is_tiny
    many, long, chunk = (3, 40, 24) if tiny else (256, 1024, 4096)
    decodes = PagedSequences([long] * many)
    pieces = [Piece(index, long - 1, long) for index in range(many)]
    yield Task(f"decodes {many} × {long}", partial(attend, place, model, decodes, pieces))
    half = long // 32 * 16
    alike = PagedSequences([long] * many, shared=half)
    name = f"decodes {many} × {long}, {half} shared"
    yield Task(name, partial(attend, place, model, alike, pieces))
    one = [Piece(0, 0, chunk)]
    yield Task(f"prefill {chunk}", partial(attend, place, model, PagedSequences([chunk]), one))
    behind = [Piece(0, chunk // 2, chunk)]
    name = f"prefill {chunk // 2} after as many"
    yield Task(name, partial(attend, place, model, PagedSequences([chunk]), behind))
    several = max(1, chunk // 256)
    short = [Piece(index, 0, chunk // several) for index in range(several)]
    sequences = PagedSequences([chunk // several] * several)
    name = f"prefill {several} × {chunk // several}"
    yield Task(name, partial(attend, place, model, sequences, short))
    tokens = 16 if tiny else TOKENS
    yield Task("add and norm", partial(norm, place, model, tokens))
    yield Task("gate", partial(gate, place, model, tokens))
    yield Task("enter", partial(enter, place, model, tokens))
    for rows in PRODUCT_ROWS[: 2 if tiny else None]:
        yield Task(f"gate and up, {rows} rows", partial(product, place, model, rows))
    for is_mixed in (False, True):
        name = "choice, mixed" if is_mixed else "choice, greedy"
        yield Task(name, partial(choice, place, model, is_mixed=is_mixed))


def attend(
    place: Place, model: Architecture, sequences: PagedSequences, pieces: list[Piece]
) -> Numbers:
    """Time one layer's attention; what is shared counts once among its bytes."""
    shape = model.blocks[0].attention
    make = choose_backend([shape], place.dtype, place.device)
    backend = make([shape], sequences.num_pages(make.page_size), place.dtype, place.device)
    step = sequences.step(pieces, make.page_size, place.device)
    backend.prepare(step)
    heads = shape.num_query_heads
    query = torch.randn(step.num_tokens, heads, shape.key_dim, device=place.device)
    query = query.to(place.dtype)
    seconds = place.seconds(lambda: backend.attend(0, query))
    spans = Spans(
        np.array([piece.start for piece in pieces]),
        np.array([piece.stop for piece in pieces]),
        0,
        sequences.shared * (len(pieces) - 1),
    )
    counted = attention(shape, spans, Form(itemsize=place.dtype.itemsize))
    is_decode = len(pieces) == step.num_decodes
    numbers = reached(place, seconds, counted.bytes, DECODE_BOUND if is_decode else None)
    if not is_decode:
        numbers = {"seconds": seconds, "flops_per_second": counted.flops / seconds}
        if not place.is_tiny:
            numbers["bound"] = PREFILL_BOUND
            numbers["holds"] = counted.flops / seconds >= PREFILL_BOUND
    return numbers


def reached(place: Place, seconds: float, num_bytes: float, bound: float | None) -> Numbers:
    """Return bytes a second, and their share of a copy's."""
    share = num_bytes / seconds / place.card.bandwidth
    numbers: Numbers = {"seconds": seconds, "bytes_per_second": num_bytes / seconds}
    numbers["share_of_copy"] = share
    if bound is not None and not place.is_tiny:
        numbers.update(bound=bound, holds=share >= bound)
    return numbers


def norm(place: Place, model: Architecture, tokens: int) -> Numbers:
    """Time a sum with the residual and the norm that follows."""
    blocks = choose_elementwise(place.dtype, place.device)
    x, residual = torch.randn(2, tokens, model.hidden_size, device=place.device).to(place.dtype)
    weight = blocks.norm_weight(x[0].clone(), 0.0)
    seconds = place.seconds(lambda: blocks.add_rms_norm(x, residual, weight, 1e-6))
    return reached(place, seconds, 4 * x.nbytes, PASS_BOUND)


def gate(place: Place, model: Architecture, tokens: int) -> Numbers:
    """Time the joining of an MLP's halves."""
    blocks = choose_elementwise(place.dtype, place.device)
    both = torch.randn(tokens, 2 * model.intermediate_size, device=place.device).to(place.dtype)
    seconds = place.seconds(lambda: blocks.act_and_mul(both, model.gate))
    return reached(place, seconds, 1.5 * both.nbytes, PASS_BOUND)


def enter(place: Place, model: Architecture, tokens: int) -> Numbers:
    """Time heads on their way from one product to attention and to their pages."""
    shape = model.blocks[0].attention
    make = choose_backend([shape], place.dtype, place.device)
    sequences = PagedSequences([tokens])
    backend = make([shape], sequences.num_pages(make.page_size), place.dtype, place.device)
    backend.prepare(sequences.step([Piece(0, 0, tokens)], make.page_size, place.device))
    width = (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.key_dim
    qkv = torch.randn(tokens, width, device=place.device).to(place.dtype)
    cos_sin = torch.ones(tokens, shape.key_dim, device=place.device)
    seconds = place.seconds(lambda: backend.store_qkv(0, qkv, cos_sin, None))
    moved = entry(shape, tokens, place.dtype.itemsize).bytes + cos_sin.nbytes
    return reached(place, seconds, moved, PASS_BOUND)


def product(place: Place, model: Architecture, rows: int) -> Numbers:
    """Time a layer's largest product, and say which ceiling it is nearer to."""
    blocks = choose_elementwise(place.dtype, place.device)
    shape = (2 * model.intermediate_size, model.hidden_size)
    weight = torch.randn(shape, device=place.device).to(place.dtype)
    multiply = choose_linear(blocks, place.device).make(weight)
    x = torch.randn(rows, model.hidden_size, device=place.device).to(place.dtype)
    seconds = place.seconds(lambda: multiply(x))
    flops = 2 * rows * weight.numel() / seconds
    moved = weight.nbytes + x.nbytes + rows * shape[0] * place.dtype.itemsize
    numbers = reached(place, seconds, moved, None)
    share = flops / place.card.flops
    return {**numbers, "flops_per_second": flops, "share_of_product": share}


def choice(place: Place, model: Architecture, *, is_mixed: bool) -> Numbers:
    """Time the choice of tokens, what the host does for it among it."""
    count = 4 if place.is_tiny else 1024
    logits = torch.randn(count, model.vocab_size, device=place.device).to(place.dtype)
    metadata = sampling_metadata(count, model.vocab_size, is_mixed=is_mixed)
    sampling = choose_sampling(place.dtype, place.device)
    seconds = place.seconds(lambda: sampling.sample(logits, metadata))
    return reached(place, seconds, logits.nbytes, None)
