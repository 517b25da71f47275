"""What comes before attention on the CPU: heads normed and turned, keys and values to their pages.

A page of a head is `[units, PAGE_SIZE]` words of keys and `[units of tokens, width]` words of
values, a word being one fp32 or two bf16: of a key two neighbouring numbers, of values the same
number of two neighbouring tokens. So a word is a factor as it lies (see `vectors`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.cpu.compiling import compiled
from engine.kernels.cpu.flash import PAGE_SIZE
from engine.kernels.cpu.scalars import narrow, widen
from engine.kernels.cpu.threads import share

TOKENS_AT_ONCE = 16


@compiled
def enter_tokens(
    words: Any,
    qkv: Any,  # [T, (Hq + 2·Hkv)·D]
    turns: Any,  # [T, 2·R] float32
    query_weight: Any,  # [D] float32, or empty for no norm
    key_weight: Any,
    eps: Any,
    slots: Any,  # [T] int32
    query: Any,  # [T, Hq, D]
    keys: Any,  # [pages, Hkv, units, PAGE_SIZE, numbers to a word]
    values: Any,  # [pages, Hkv, units of tokens, width, numbers to a word]
) -> None:
    """Split, norm and turn; write the queries out, keys and values to their slots."""
    items = (len(qkv) + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
    arguments = (qkv, turns, query_weight, key_weight, eps, slots, query, keys, values)
    share(words, items, _enter_some, arguments)


@compiled
def store_tokens(words: Any, key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    """Write `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
    items = (len(slots) + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
    share(words, items, _store_some, (key, value, slots, keys, values))


@compiled
def _enter_some(
    item: Any,
    qkv: Any,
    turns: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    slots: Any,
    query: Any,
    keys: Any,
    values: Any,
) -> None:
    query_heads, width = query.shape[1:]
    heads = keys.shape[1]
    turned = np.empty(width, np.float32)
    first_value = (query_heads + heads) * width
    for token in range(item * TOKENS_AT_ONCE, min((item + 1) * TOKENS_AT_ONCE, len(qkv))):
        row, like = qkv[token], qkv[0, 0]
        for head in range(query_heads):
            _turn(row[head * width :], turns[token], query_weight, eps, turned)
            for d in range(width):
                query[token, head, d] = narrow(turned[d], like)
        page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
        for head in range(heads):
            _turn(row[(query_heads + head) * width :], turns[token], key_weight, eps, turned)
            numbers = keys.shape[4]
            for unit in range(keys.shape[2]):
                for part in range(numbers):
                    number = narrow(turned[unit * numbers + part], like)
                    keys[page, head, unit, offset, part] = number
            _store_value(token, head, qkv, first_value + head * width, width, slots, values)


@compiled
def _turn(row: Any, turns: Any, weight: Any, eps: Any, out: Any) -> None:
    """Norm a head where there is a weight, and turn its first numbers."""
    width, half = len(out), len(turns) // 2
    for d in range(width):
        out[d] = widen(row[d])
    if len(weight) > 0:
        total = np.float32(0)
        for d in range(width):
            total += out[d] * out[d]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for d in range(width):
            out[d] *= scale * weight[d]
    for d in range(half):
        first, second = out[d], out[half + d]
        cos, sin = turns[d], turns[half + d]
        out[d] = first * cos - second * sin
        out[half + d] = second * cos + first * sin


@compiled
def _store_some(item: Any, key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    heads, width = value.shape[1:]
    flat = value.reshape(len(slots), heads * width)
    for token in range(item * TOKENS_AT_ONCE, min((item + 1) * TOKENS_AT_ONCE, len(slots))):
        page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
        for head in range(heads):
            numbers = keys.shape[4]
            for unit in range(keys.shape[2]):
                for part in range(numbers):
                    number = key[token, head, unit * numbers + part]
                    keys[page, head, unit, offset, part] = number
            _store_value(token, head, flat, head * width, width, slots, values)


@compiled
def _store_value(
    token: Any, head: Any, rows: Any, first: Any, width: Any, slots: Any, values: Any
) -> None:
    """Write numbers `first : first + width` of a token's row as its value.

    The first of two tokens in a word writes both: the other's are those of the next row where it
    is stored in the same step, else zero, as what lay there before must not be met. So no two
    threads write one word.
    """
    page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
    numbers = values.shape[4]
    unit, part = offset // numbers, offset % numbers
    if part == 0:
        for d in range(width):
            values[page, head, unit, d, 0] = rows[token, first + d]
        if numbers == 2:
            if token + 1 < len(slots) and slots[token + 1] == slots[token] + 1:
                for d in range(width):
                    values[page, head, unit, d, 1] = rows[token + 1, first + d]
            else:
                for d in range(width):
                    values[page, head, unit, d, 1] = 0
    elif token == 0 or slots[token - 1] != slots[token] - 1:
        for d in range(width):
            values[page, head, unit, d, part] = rows[token, first + d]
