"""Flash attention to latents (MLA), tile by tile: rows of absorbed queries against cached latents.

All heads of a token attend to one key, a latent and a rotary part, and its value is the latent. So
a block of places is loaded once, for the scores and for their weighted sum.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import AttentionShape
from ..quantised import FP8
from . import tile_buffers
from .combine import PartialOutputs
from .flash import readable, widened
from .launch import arch_of, cdiv, launch, launches_none, next_power_of_2
from .tiles import ENTRY_FIELDS, TILE_FIELDS
from .tuned_tiles import KernelConfig, cached_choice, config_for

LOG2_E = math.log2(math.e)
FIELDS, FIELDS_OF_ENTRY = tl.constexpr(TILE_FIELDS), tl.constexpr(ENTRY_FIELDS)


@cached_choice
def latent_config(
    shape: AttentionShape, dtype: torch.dtype, arch: str, *, is_wide: bool
) -> KernelConfig:
    """Return the kernel config for wide or narrow tiles of a layer; its ROWS are a tile's.

    Narrow tiles have the rows of one token, or of as many tokens with few heads as a product takes.
    """
    rank, bits = _block(shape.value_dim), 8 * dtype.itemsize
    wide = config_for("latents_wide", arch, rank=rank, bits=bits)
    rows = _block(shape.num_query_heads)
    if is_wide or rows >= wide.sizes["ROWS"]:
        return wide
    narrow = config_for("latents_narrow", arch, rank=rank, bits=bits)
    return replace(narrow, sizes={**narrow.sizes, "ROWS": rows})


def head_blocks(shape: AttentionShape, dtype: torch.dtype, arch: str) -> int:
    """Return the number of blocks, of one tile each, that a token's heads are divided into."""
    rows = latent_config(shape, dtype, arch, is_wide=True).sizes["ROWS"]
    return cdiv(shape.num_query_heads, rows)


def attend_latent_tiles(
    tiles: tuple[Tensor, int],
    most: int,
    shape: AttentionShape,
    query: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    out: Tensor,
    parts: PartialOutputs,
    *,
    is_wide: bool,
) -> None:
    """Attend queries, latent `[T, H, R]` and rotary `[T, H, Dr]`, of `most` wide or narrow tiles.

    `tiles` are the tile buffers and the offset of the header; `cache` the spans' page table and the
    latents `[pages, page_size, R + Dr]`, of the query's dtype or fp8. A tile that is its tokens'
    only one writes to `out [T, H, R]`, split-KV tiles to `parts`. Each block of a token's heads
    moves the tile's latents once; queries and outputs are moved once.
    """
    if launches_none(most):
        return
    pages, latents = cache
    numbers, header = tiles
    arch = arch_of(out.device)
    config = latent_config(shape, latents.dtype, arch, is_wide=is_wide)
    heads, rank = shape.num_query_heads, shape.value_dim
    blocks = head_blocks(shape, latents.dtype, arch)
    counted, listed = (
        (tile_buffers.NUM_WIDE, tile_buffers.WIDE)
        if is_wide
        else (tile_buffers.NUM_NARROW, tile_buffers.NARROW)
    )
    if query[0].dtype == torch.float32 and latents.dtype == FP8:
        # The config is for stored sizes; widened numbers take more shared memory.
        config = replace(config, sizes={**config.sizes, "PLACES": 16}, num_stages=1)
    absorbed, rotary = (part if part.stride(2) == 1 else part.contiguous() for part in query)
    launch(
        _attend_latents,
        (most * blocks,),
        *(numbers, header + counted, header + listed, header + tile_buffers.ENTRIES),
        *(absorbed, rotary, *absorbed.stride()[:2], *rotary.stride()[:2]),
        *(pages, readable(latents, arch), out, *parts, shape.scaling * LOG2_E),
        *(heads, cdiv(heads, blocks), blocks),
        config=config,
        RANK=rank,
        RANK_BLOCK=_block(rank),
        ROTARY=shape.key_dim - rank,
        ROTARY_BLOCK=_block(shape.key_dim - rank),
        PAGE_SIZE=latents.shape[1],
    )


def _block(width: int) -> int:
    return max(16, next_power_of_2(width))


@triton.jit(
    do_not_specialize=["counted", "listed", "of_entries", "scale", "num_heads", "group", "blocks"]
)
def _attend_latents(
    numbers,
    counted,
    listed,
    of_entries,
    absorbed,  # [T, H, RANK] by its strides
    rotary,  # [T, H, ROTARY] by its strides
    token_stride,
    head_stride,
    rotary_token_stride,
    rotary_head_stride,
    span_pages,
    latents,  # [pages, PAGE_SIZE, RANK + ROTARY]
    out,  # [T, H, RANK]
    part_values,
    part_states,
    scale,
    num_heads,
    group,
    blocks,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
):
    # Blocks of a token's heads are adjacent: they read the same latents at about the same time.
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if number >= tl.load(numbers + counted):
        return
    tile = numbers + tl.load(numbers + listed) + number * FIELDS
    entries = numbers + tl.load(numbers + of_entries) + tl.load(tile) * FIELDS_OF_ENTRY
    count = tl.load(tile + 1)
    pages = span_pages + tl.load(tile + 2)
    begin, end, is_end = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    # A row is a token and one of the block's heads.
    rows = tl.arange(0, ROWS)
    entry = entries + rows // group * FIELDS_OF_ENTRY
    heads = block * group + rows % group
    is_row = (rows // group < count) & (heads < num_heads)
    token = tl.load(entry, is_row, other=0).to(tl.int64)
    first = tl.load(entry + 2, is_row, other=0)
    stop = tl.load(entry + 3, is_row, other=0)
    dims, angles = tl.arange(0, RANK_BLOCK), tl.arange(0, ROTARY_BLOCK)
    is_dim, is_angle = dims < RANK, angles < ROTARY
    row = (token * token_stride + heads.to(tl.int64) * head_stride)[:, None]
    query = tl.load(absorbed + row + dims[None, :], is_row[:, None] & is_dim[None, :], other=0.0)
    row = (token * rotary_token_stride + heads.to(tl.int64) * rotary_head_stride)[:, None]
    turned = tl.load(rotary + row + angles[None, :], is_row[:, None] & is_angle[None, :], other=0.0)
    total = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for place in range(begin, end, PLACES):
        places = place + tl.arange(0, PLACES)
        # Memory after the end may be uninitialised and contain anything, including NaN.
        is_place = places < end
        page = tl.load(pages + places // PAGE_SIZE, is_place, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + places % PAGE_SIZE
        stored = latents + slot[:, None] * (RANK + ROTARY)
        latent = tl.load(stored + dims[None, :], is_place[:, None] & is_dim[None, :], other=0.0)
        key = tl.load(
            stored + RANK + angles[None, :], is_place[:, None] & is_angle[None, :], other=0.0
        )
        latent, key = widened(latent, query.dtype), widened(key, query.dtype)
        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(key), scores, input_precision="ieee") * scale
        is_seen = (places[None, :] >= first[:, None]) & (places[None, :] < stop[:, None])
        # A tile may end before the visible range of its rows.
        scores = tl.where(is_seen & is_place[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        peak, mass = highest, mass * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        total = tl.dot(weights.to(latent.dtype), latent, total, input_precision="ieee")
    is_number = is_row[:, None] & is_dim[None, :]
    if is_end:
        share = 1 / tl.where(mass > 0, mass, 1.0)  # avoids 0 / 0 if nothing was visible
        to = (token * num_heads + heads)[:, None] * RANK + dims[None, :]
        tl.store(out + to, (total * share[:, None]).to(out.dtype.element_ty), is_number)
    else:
        part = tl.load(entry + 1, is_row, other=0).to(tl.int64) * num_heads + heads
        tl.store(part_values + part[:, None] * RANK + dims[None, :], total, is_number)
        tl.store(part_states + 2 * part, peak, is_row)
        tl.store(part_states + 2 * part + 1, mass, is_row)
