"""Fused QK norm, RoPE and KV cache write on GPUs, before attention.

Pages are `keys [pages, Hkv, page_size, Dk]` and `values [pages, Hkv, page_size, Dv]`, of the
network's dtype or fp8 (float8_e4m3fn), which is written bit by bit, so that GPUs without that type
can write it, too: larger numbers saturate, NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import AttentionShape, HeadNorms
from .fp8_bits import as_e4m3
from .launch import arch_of, cdiv, launch, next_power_of_2
from .tuned_tiles import config_for


def store_qkv(
    qkv: Tensor,
    cos_sin: Tensor,
    norms: HeadNorms | None,
    shape: AttentionShape,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Split, norm, rotate and store in one pass; see `AttentionBackend.store_qkv`.

    `slots [T]` int32. Moves each number of `qkv [T, (Hq + 2·Hkv)·D]` once in and once out, and
    8·T·R + 4·T bytes.
    """
    heads, width = shape.num_kv_heads, shape.key_dim
    assert width == shape.value_dim
    assert qkv.is_contiguous()
    assert cos_sin.is_contiguous()
    num_tokens = qkv.shape[0]
    query = qkv.new_empty(num_tokens, shape.num_query_heads, width)
    query_weight, key_weight, eps = norms or (None, None, 0.0)
    config = config_for("enter", arch_of(qkv.device), head_dim=width)
    at_once = config.sizes["HEADS"]
    tiles = cdiv(shape.num_query_heads, at_once) + 2 * cdiv(heads, at_once)
    launch(
        *(_enter, (num_tokens, tiles), qkv, cos_sin, query_weight, key_weight, float(eps)),
        *(slots, query, _stored(keys), _stored(values), shape.num_query_heads, heads),
        config=config, WIDTH=width, TURNED=cos_sin.shape[1] // 2, PAGE_SIZE=keys.shape[2],
        BLOCK=next_power_of_2(width),
    )  # fmt: skip
    return query


def store_kv(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Write `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots.

    Moves each number once in and once out, and 4·T bytes.
    """
    key, value = (_with_whole_heads(numbers) for numbers in (key, value))
    heads, key_width, value_width = key.shape[1], key.shape[2], value.shape[2]
    config = config_for("store", arch_of(key.device), head_dim=key_width)
    launch(
        *(_store, (len(key), 2 * cdiv(heads, config.sizes["HEADS"])), key, value, slots),
        *(_stored(keys), _stored(values), heads, *key.stride()[:2], *value.stride()[:2]),
        config=config, KEY_WIDTH=key_width, VALUE_WIDTH=value_width, PAGE_SIZE=keys.shape[2],
        BLOCK=next_power_of_2(max(key_width, value_width)),
    )  # fmt: skip


def store_latents(latents: Tensor, slots: Tensor, pages: Tensor) -> None:
    """Write `latents [T, 1, W]` to their slots of `pages [pages, page_size, W]`.

    Moves each number once in and once out, and 4·T bytes.
    """
    latents, pages = _with_whole_heads(latents), _stored(pages)
    width, strides = latents.shape[2], latents.stride()[:2]
    config = replace(
        config_for("store", arch_of(latents.device), head_dim=width), sizes={"HEADS": 1}
    )
    # Programs for keys only.
    launch(
        *(_store, (len(latents), 1), latents, latents, slots, pages, pages, 1, *strides, *strides),
        config=config, KEY_WIDTH=width, VALUE_WIDTH=width, PAGE_SIZE=pages.shape[1],
        BLOCK=next_power_of_2(width),
    )  # fmt: skip


def _stored(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def _with_whole_heads(numbers: Tensor) -> Tensor:
    return numbers if numbers.stride(2) == 1 else numbers.contiguous()


# The offsets of a step's own arrays, and the number of heads, must not specialise the kernel.
@triton.jit(
    do_not_specialize=["query_heads", "key_heads"], do_not_specialize_on_alignment=["slots"]
)
def _enter(
    qkv,  # [T, (Hq + 2·Hkv)·WIDTH]
    cos_sin,  # [T, 2·TURNED] fp32
    query_weight,  # [WIDTH], or None for no norm
    key_weight,
    eps,
    slots,  # [T]
    query,  # [T, Hq, WIDTH]
    keys,  # [pages, Hkv, PAGE_SIZE, WIDTH]
    values,
    query_heads,
    key_heads,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Process some heads of one kind of one token and store them."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_tiles, key_tiles = tl.cdiv(query_heads, HEADS), tl.cdiv(key_heads, HEADS)
    row = qkv + token * (query_heads + 2 * key_heads) * WIDTH
    own_cos_sin = cos_sin + token * 2 * TURNED
    if tile < query_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = heads < query_heads
        source = row + heads * WIDTH
        numbers = _turned(source, is_head, own_cos_sin, query_weight, eps, WIDTH, TURNED, BLOCK)
        _write(query + (token * query_heads + heads) * WIDTH, is_head, numbers, WIDTH, BLOCK)
    else:
        is_key = tile < query_tiles + key_tiles
        heads = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)[:, None]
        heads = tl.where(is_key, heads, heads - key_tiles * HEADS)
        is_head = heads < key_heads
        to = _place(tl.load(slots + token), heads, key_heads, PAGE_SIZE) * WIDTH
        source = row + (query_heads + heads) * WIDTH
        if is_key:
            numbers = _turned(source, is_head, own_cos_sin, key_weight, eps, WIDTH, TURNED, BLOCK)
            _write(keys + to, is_head, numbers, WIDTH, BLOCK)
        else:
            numbers = _read(source + key_heads * WIDTH, is_head, WIDTH, BLOCK)
            _write(values + to, is_head, numbers, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["heads_there"], do_not_specialize_on_alignment=["slots"])
def _store(
    key,  # [T, Hkv, KEY_WIDTH]
    value,  # [T, Hkv, VALUE_WIDTH]
    slots,  # [T]
    keys,  # [pages, Hkv, PAGE_SIZE, KEY_WIDTH]
    values,  # [pages, Hkv, PAGE_SIZE, VALUE_WIDTH]
    heads_there,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Store some heads' keys, or values, of one token."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = (tile // 2) * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = heads < heads_there
    place = _place(tl.load(slots + token), heads, heads_there, PAGE_SIZE)
    if tile % 2 == 0:
        source = key + token * key_stride + heads * key_head_stride
        numbers = _read(source, is_head, KEY_WIDTH, BLOCK)
        _write(keys + place * KEY_WIDTH, is_head, numbers, KEY_WIDTH, BLOCK)
    else:
        source = value + token * value_stride + heads * value_head_stride
        numbers = _read(source, is_head, VALUE_WIDTH, BLOCK)
        _write(values + place * VALUE_WIDTH, is_head, numbers, VALUE_WIDTH, BLOCK)


@triton.jit
def _place(slot, heads, key_heads, PAGE_SIZE: tl.constexpr):
    """Return the vectors of the pages that heads of a slot occupy."""
    page, offset = slot.to(tl.int64) // PAGE_SIZE, slot % PAGE_SIZE
    return (page * key_heads + heads) * PAGE_SIZE + offset


@triton.jit
def _turned(
    source,  # pointers [HEADS, 1]
    is_head,
    cos_sin,
    weight,
    eps,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return heads `[HEADS, BLOCK]` fp32, normed if there is a weight, and rotated."""
    columns = tl.arange(0, BLOCK)[None, :]
    is_there = columns < WIDTH
    numbers = _read(source, is_head, WIDTH, BLOCK)
    scale = 1.0
    if weight is not None:
        scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / WIDTH + eps)[:, None]
        numbers *= scale * tl.load(weight + columns, is_there, other=0.0).to(tl.float32)
    if TURNED > 0:
        is_first, is_turned = columns < TURNED, columns < 2 * TURNED
        # A number's partner in the rotation is read again: it is in the nearest cache.
        partners = tl.where(is_first, columns + TURNED, columns - TURNED)
        others = tl.load(source + partners, is_head & is_turned, other=0.0).to(tl.float32)
        if weight is not None:
            others *= scale * tl.load(weight + partners, is_turned, other=0.0).to(tl.float32)
        angles = tl.where(is_first, columns, columns - TURNED)
        cos = tl.load(cos_sin + angles, is_turned, other=1.0)
        sin = tl.load(cos_sin + TURNED + angles, is_turned, other=0.0)
        numbers = numbers * cos + tl.where(is_first, -others, others) * sin
    return numbers


@triton.jit
def _read(source, is_head, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, :]
    return tl.load(source + columns, is_head & (columns < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _write(target, is_head, numbers, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, :]
    kind: tl.constexpr = target.dtype.element_ty
    stored = as_e4m3(numbers) if kind == tl.uint8 else numbers.to(kind)
    tl.store(target + columns, stored, is_head & (columns < WIDTH))
