"""Flash attention over paged KV, tile by tile: rows of queries against places of pages.

By Dao et al. (2022): block after block of places, each row keeps its highest score, the softmax
mass relative to it, and the weighted sum of values (online softmax).
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
from .fp8_bits import OF_HALVES, halves_of_e4m3
from .launch import arch_of, launch, launches_none, next_power_of_2
from .tiles import ENTRY_FIELDS, TILE_FIELDS
from .tuned_tiles import KernelConfig, cached_choice, config_for

# The first architecture with fp8 (Ada).
FIRST_WITH_FP8 = 89
LOG2_E = tl.constexpr(math.log2(math.e))
NUM_WIDE, NUM_NARROW = tl.constexpr(tile_buffers.NUM_WIDE), tl.constexpr(tile_buffers.NUM_NARROW)
WIDE, NARROW = tl.constexpr(tile_buffers.WIDE), tl.constexpr(tile_buffers.NARROW)
ENTRIES = tl.constexpr(tile_buffers.ENTRIES)
FIELDS, FIELDS_OF_ENTRY = tl.constexpr(TILE_FIELDS), tl.constexpr(ENTRY_FIELDS)


@cached_choice
def attention_config(
    shape: AttentionShape, dtype: torch.dtype, arch: str, *, is_wide: bool
) -> KernelConfig:
    """Return the kernel config for wide or narrow tiles of a layer; each fits one token at least.

    Its ROWS are the most query rows of a tile.
    """
    width, bits = max(_block(shape.key_dim), _block(shape.value_dim)), 8 * dtype.itemsize
    if is_wide:
        config = config_for("attention_wide", arch, width=width, bits=bits)
    else:
        config = config_for("attention_narrow", arch, width=width, bits=bits)
    rows = _block(shape.num_query_heads // shape.num_kv_heads)
    rows = max(rows, config.sizes.get("ROWS", rows))
    return replace(config, sizes={**config.sizes, "ROWS": rows})


def attend_tiles(
    tiles: tuple[Tensor, int],
    most: int,
    shape: AttentionShape,
    query: Tensor,
    cache: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    out: Tensor,
    parts: PartialOutputs,
    *,
    positions: Tensor | None = None,
    is_wide: bool,
) -> None:
    """Attend the `query [T, Hq, Dk]` of `most` wide or narrow tiles.

    `tiles` are the tile buffers and the offset of the header; `cache` the spans' page table, keys
    `[pages, Hkv, page_size, Dk]` and values `[…, Dv]`, of the query's dtype or fp8; `sinks [Hq]`;
    `positions [T]` are read if the shape has a position bias.
    A tile that is its tokens' only one writes to `out [T, Hq, Dv]`, split-KV tiles to `parts`.
    Moves each tile's keys and values, queries, and outputs, once.
    """
    if launches_none(most):
        return
    pages, keys, values = cache
    arch = arch_of(query.device)
    config = attention_config(shape, keys.dtype, arch, is_wide=is_wide)
    keys, values = readable(keys, arch), readable(values, arch)
    # A score is scaled, and in powers of 2; with a softcap, softcap · tanh(x), which is
    # softcap · (2 · sigmoid(2 · x) - 1).
    inner, outer = shape.scaling * LOG2_E.value, 0.0
    if shape.softcap:
        inner, outer = 2 * shape.scaling / shape.softcap, shape.softcap * LOG2_E.value
    heads, bias = shape.num_kv_heads, shape.position_bias
    launch(
        _attend_tiles,
        (most * heads,),
        *(*tiles, query, pages, keys, values, sinks, out, *parts, inner, outer),
        *(None if bias is None else bias.logits, None if bias is None else positions),
        *(heads, shape.num_query_heads // heads),
        config=config,
        IS_WIDE=is_wide,
        KEY_DIM=shape.key_dim,
        KEY_BLOCK=_block(shape.key_dim),
        VALUE_DIM=shape.value_dim,
        VALUE_BLOCK=_block(shape.value_dim),
        PAGE_SIZE=keys.shape[2],
        HAS_SOFTCAP=shape.softcap > 0,
        HAS_SINKS=sinks is not None,
        REACH=0 if bias is None else bias.reach,
    )


def readable(stored: Tensor, arch: str) -> Tensor:
    """Return fp8 as bytes if a GPU is too old to convert it: `widened` then does it bit by bit."""
    reads_fp8 = arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= FIRST_WITH_FP8
    return stored if stored.dtype != FP8 or reads_fp8 else stored.view(torch.uint8)


def _block(width: int) -> int:
    return max(16, next_power_of_2(width))


@triton.jit(do_not_specialize=["header", "inner", "outer", "num_heads", "group"])
def _attend_tiles(
    numbers,
    header,
    query,
    span_pages,
    keys,
    values,
    sinks,
    out,
    part_values,
    part_states,
    inner,
    outer,
    bias,
    positions,
    num_heads,
    group,
    IS_WIDE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    REACH: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
):
    number, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    if number >= tl.load(numbers + header + (NUM_WIDE if IS_WIDE else NUM_NARROW)):
        return
    tile = numbers + tl.load(numbers + header + (WIDE if IS_WIDE else NARROW)) + number * FIELDS
    entries = numbers + tl.load(numbers + header + ENTRIES) + tl.load(tile) * FIELDS_OF_ENTRY
    count = tl.load(tile + 1)
    pages = span_pages + tl.load(tile + 2)
    begin, end, is_end = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    # A row is a token and one of the query heads of the key head.
    rows = tl.arange(0, ROWS)
    entry = entries + rows // group * FIELDS_OF_ENTRY
    is_row = rows // group < count
    token = tl.load(entry, is_row, other=0).to(tl.int64)
    first = tl.load(entry + 2, is_row, other=0)
    stop = tl.load(entry + 3, is_row, other=0)
    heads = head * group + rows % group
    dims, columns = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    at = (token * num_heads * group + heads)[:, None] * KEY_DIM + dims[None, :]
    queries = tl.load(query + at, is_row[:, None] & (dims < KEY_DIM)[None, :], other=0.0)
    total = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    own_bias = rows  # it is not read
    if REACH > 0:
        # The place of the bias that a row's first key takes.
        position = tl.load(positions + token, is_row, other=0)
        own_bias = bias + heads * (2 * REACH + 1) + REACH - position
    met = (queries, first, stop, end, keys, values, pages, head, num_heads, inner, outer, own_bias)
    if IS_WIDE:
        # Blocks that every row sees completely need no masks.
        last_first = tl.max(tl.where(is_row, first, 0), 0)
        first_stop = tl.min(tl.where(is_row, stop, end), 0)
        whole = tl.minimum(begin + tl.cdiv(tl.maximum(last_first - begin, 0), PLACES) * PLACES, end)
        whole_end = begin + tl.maximum(tl.minimum(first_stop, end) - begin, 0) // PLACES * PLACES
        whole_end = tl.maximum(whole, whole_end)
        total, mass, peak = _meet(
            *(begin, whole, total, mass, peak),
            *met,
            *(KEY_DIM, VALUE_DIM, PAGE_SIZE, HAS_SOFTCAP, REACH > 0, PLACES),
            IS_MASKED=True,
        )
        total, mass, peak = _meet(
            *(whole, whole_end, total, mass, peak),
            *met,
            *(KEY_DIM, VALUE_DIM, PAGE_SIZE, HAS_SOFTCAP, REACH > 0, PLACES),
            IS_MASKED=False,
        )
        begin = whole_end
    total, mass, peak = _meet(
        *(begin, end, total, mass, peak),
        *met,
        *(KEY_DIM, VALUE_DIM, PAGE_SIZE, HAS_SOFTCAP, REACH > 0, PLACES),
        IS_MASKED=True,
    )
    is_number = is_row[:, None] & (columns < VALUE_DIM)[None, :]
    if is_end:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, is_row, other=0.0).to(tl.float32) * LOG2_E
            highest = tl.maximum(peak, sink)
            shrink = tl.exp2(peak - highest)
            total, mass = total * shrink[:, None], mass * shrink + tl.exp2(sink - highest)
        share = 1 / tl.where(mass > 0, mass, 1.0)  # avoids 0 / 0 if nothing was visible
        place = (token * num_heads * group + heads)[:, None] * VALUE_DIM + columns[None, :]
        tl.store(out + place, (total * share[:, None]).to(out.dtype.element_ty), is_number)
    else:
        part = tl.load(entry + 1, is_row, other=0).to(tl.int64) * num_heads * group + heads
        tl.store(part_values + part[:, None] * VALUE_DIM + columns[None, :], total, is_number)
        tl.store(part_states + 2 * part, peak, is_row)
        tl.store(part_states + 2 * part + 1, mass, is_row)


@triton.jit
def _meet(
    begin,
    last,
    total,  # [ROWS, VALUE_BLOCK]
    mass,  # [ROWS]
    peak,  # [ROWS]
    queries,  # [ROWS, KEY_BLOCK]
    first,  # [ROWS]
    stop,  # [ROWS]
    end,
    keys,
    values,
    pages,
    head,
    num_heads,
    inner,
    outer,
    bias,  # [ROWS] pointers
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PLACES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Attend rows to the places `begin` to `last`, of which those before `end` are the tile's."""
    KEY_BLOCK: tl.constexpr = queries.shape[1]
    VALUE_BLOCK: tl.constexpr = total.shape[1]
    dims, columns = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    for place in range(begin, last, PLACES):
        places = place + tl.arange(0, PLACES)
        # Memory after the end may be uninitialised and contain anything, including NaN.
        is_place = places < end
        page = tl.load(pages + places // PAGE_SIZE, is_place, other=0).to(tl.int64)
        slot = (page * num_heads + head) * PAGE_SIZE + places % PAGE_SIZE
        from_keys = keys + slot[None, :] * KEY_DIM + dims[:, None]  # [KEY_BLOCK, PLACES]
        if IS_MASKED or KEY_DIM != KEY_BLOCK:
            key = tl.load(from_keys, is_place[None, :] & (dims < KEY_DIM)[:, None], other=0.0)
        else:
            key = tl.load(from_keys)
        key = widened(key, queries.dtype)
        scores = tl.dot(queries, key, input_precision="ieee") * inner  # [ROWS, PLACES]
        if HAS_SOFTCAP:
            scores = outer * (2 * tl.sigmoid(scores) - 1)
        if IS_MASKED:
            is_seen = (places[None, :] >= first[:, None]) & (places[None, :] < stop[:, None])
            # A tile may end before the visible range of its rows.
            is_seen &= is_place[None, :]
        if HAS_BIAS:
            from_bias = bias[:, None] + places[None, :]
            if IS_MASKED:
                scores += tl.load(from_bias, is_seen, other=0.0) * LOG2_E
            else:
                scores += tl.load(from_bias) * LOG2_E
        if IS_MASKED:
            scores = tl.where(is_seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        base = highest
        if IS_MASKED:
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        peak, mass = highest, mass * shrink + tl.sum(weights, 1)
        from_values = values + slot[:, None] * VALUE_DIM + columns[None, :]  # [PLACES, VALUE_BLOCK]
        if IS_MASKED or VALUE_DIM != VALUE_BLOCK:
            value = tl.load(
                from_values, is_place[:, None] & (columns < VALUE_DIM)[None, :], other=0.0
            )
        else:
            value = tl.load(from_values)
        value = widened(value, queries.dtype)
        total = total * shrink[:, None]
        total = tl.dot(weights.to(value.dtype), value, total, input_precision="ieee")
    return total, mass, peak


@triton.jit
def widened(numbers, kind: tl.constexpr):
    """Convert numbers to another dtype; uint8 contains the bits of float8_e4m3fn."""
    if numbers.dtype == tl.uint8:
        wide = halves_of_e4m3(numbers) * OF_HALVES
        return tl.where((numbers & 0x7F) == 0x7F, float("nan"), wide).to(kind)
    return numbers.to(kind)
