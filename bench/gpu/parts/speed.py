"""Passes, products and choices as shares of the card's ceilings, on Llama-3-8B's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.counts import entry
from bench.gpu.parts.steps import PagedSequences, Piece, sampling_metadata
from bench.gpu.parts.task import Numbers, Place, Task
from bench.gpu.shapes import architecture
from tidemill.engine.kernels.backends import (
    choose_backend,
    choose_elementwise,
    choose_linear,
    choose_sampling,
)
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.model.config.architecture import Architecture

# The goal for passes, as a share of a copy.
PASS_BOUND = 0.85
TOKENS = 8192
PRODUCT_ROWS = (1, 64, 256, 1024, 8192)


def tasks(place: Place) -> Iterator[Task]:
    """Yield passes, products and choices."""
    model = architecture("tiny" if place.is_tiny else "llama-3-8b")
    tiny = place.is_tiny
    tokens = 16 if tiny else TOKENS
    yield Task("add and norm", partial(norm, place, model, tokens), 1)
    yield Task("gate", partial(gate, place, model, tokens), 1)
    yield Task("enter", partial(enter, place, model, tokens), 1)
    for rows in PRODUCT_ROWS[: 2 if tiny else None]:
        yield Task(f"gate and up, {rows} rows", partial(product, place, model, rows), 1)
    for is_mixed in (False, True):
        name = "choice, mixed" if is_mixed else "choice, greedy"
        yield Task(name, partial(choice, place, model, is_mixed=is_mixed), 1)


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
    seconds = place.replay_seconds(lambda: blocks.add_rms_norm(x, residual, weight, 1e-6))
    return reached(place, seconds, 4 * x.nbytes, PASS_BOUND)


def gate(place: Place, model: Architecture, tokens: int) -> Numbers:
    """Time the joining of an MLP's halves."""
    blocks = choose_elementwise(place.dtype, place.device)
    both = torch.randn(tokens, 2 * model.intermediate_size, device=place.device).to(place.dtype)
    gate = model.gate
    assert isinstance(gate, Gate)
    seconds = place.replay_seconds(lambda: blocks.act_and_mul(both, gate))
    return reached(place, seconds, 1.5 * both.nbytes, PASS_BOUND)


def enter(place: Place, model: Architecture, tokens: int) -> Numbers:
    """Time heads between a product and attention, and their storing in pages."""
    shape = model.blocks[0].attention
    make = choose_backend([shape], place.dtype, place.device)
    sequences = PagedSequences([tokens])
    backend = make([shape], sequences.num_pages(make.page_size), place.dtype, place.device)
    backend.prepare(sequences.step([Piece(0, 0, tokens)], make.page_size, place.device))
    width = (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.key_dim
    qkv = torch.randn(tokens, width, device=place.device).to(place.dtype)
    cos_sin = torch.ones(tokens, shape.key_dim, device=place.device)
    seconds = place.replay_seconds(lambda: backend.store_qkv(0, qkv, cos_sin, None))
    moved = entry(shape, tokens, place.dtype.itemsize).bytes + cos_sin.nbytes
    return reached(place, seconds, moved, PASS_BOUND)


def product(place: Place, model: Architecture, rows: int) -> Numbers:
    """Time a layer's largest product, and report its nearer ceiling."""
    blocks = choose_elementwise(place.dtype, place.device)
    shape = (2 * model.intermediate_size, model.hidden_size)
    weight = torch.randn(shape, device=place.device).to(place.dtype)
    multiply = choose_linear(blocks, place.device).make(weight)
    x = torch.randn(rows, model.hidden_size, device=place.device).to(place.dtype)
    seconds = place.replay_seconds(lambda: multiply(x))
    flops = 2 * rows * weight.numel() / seconds
    moved = weight.nbytes + x.nbytes + rows * shape[0] * place.dtype.itemsize
    numbers = reached(place, seconds, moved, None)
    share = flops / place.card.flops
    return {**numbers, "flops_per_second": flops, "share_of_product": share}


def choice(place: Place, model: Architecture, *, is_mixed: bool) -> Numbers:
    """Time the choice of tokens, including the host's part."""
    count = 4 if place.is_tiny else 1024
    logits = torch.randn(count, model.vocab_size, device=place.device).to(place.dtype)
    metadata = sampling_metadata(count, model.vocab_size, is_mixed=is_mixed)
    sampling = choose_sampling(place.dtype, place.device)
    seconds = place.seconds(lambda: sampling.sample(logits, metadata))
    return reached(place, seconds, logits.nbytes, None)
