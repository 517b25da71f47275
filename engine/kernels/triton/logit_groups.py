"""Group statistics of logits in one read: the maximum and softmax mass of every `GROUP` of a row.

Sampling and logprobs use these, and read only a few groups again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import arch_of, cdiv, launch, next_power_of_2
from .logits_processors import ProcessorInputs, shaped
from .sampling_inputs import NUM_WORDS, word_offset
from .tuned_tiles import config_for

GROUP = 256
# Most groups of a row: one kernel variant serves up to 262,144 tokens.
MOST_GROUPS = 1024
ROW, FACTOR = map(word_offset, ("row", "factor"))
IS_FINITE = tl.constexpr(1)
IS_BAD = tl.constexpr(2)


class GroupStats(NamedTuple):
    """Statistics of the groups of each row's logits; entries after the last are not written."""

    peaks: Tensor  # [N, groups] fp32, of the processed logits
    weights: Tensor  # [N, groups] fp32: Σ exp((logit - peak) · factor), where the factor is not 0
    flags: Tensor  # [N, groups] int8: for the logits before processing


def group_capacity(vocabulary: int) -> int:
    """Return the number of groups that a row's arrays have room for."""
    return max(MOST_GROUPS, next_power_of_2(cdiv(vocabulary, GROUP)))


def measure_groups(
    logits: Tensor, records: Tensor, shapes: ProcessorInputs, first: int, count: int
) -> GroupStats:
    """Compute the group statistics of `count` rows, those of `records [first :]`, of `logits`.

    logits `[rows, V]` of any float dtype, their rows dense; the results have `count` rows. Moves
    the logits of these rows, and 9 / 256 bytes for each of them; V / 8 bytes for each kind of bits
    that shape a row, and 4 · V where numbers are added to it.
    """
    vocabulary = logits.shape[1]
    room = group_capacity(vocabulary)
    peaks, weights = (logits.new_empty(count, room, dtype=torch.float32) for _ in range(2))
    flags = logits.new_empty(count, room, dtype=torch.int8)
    config = config_for("measure_logits", arch_of(logits.device))
    at_once = config.sizes["AT_ONCE"]
    grid = (count, cdiv(cdiv(vocabulary, GROUP), at_once))
    words = (cdiv(vocabulary, 32), shapes.masks.shape[1])
    launch(
        _measure,
        grid,
        logits,
        records,
        *shapes,
        peaks,
        weights,
        flags,
        first,
        logits.stride(0),
        vocabulary,
        *words,
        config=config,
        ROOM=room,
        GROUP=GROUP,
    )
    return GroupStats(peaks, weights, flags)


@triton.jit(do_not_specialize=["first", "words", "mask_words"])
def _measure(
    logits,
    records,
    bits,
    adds,
    masks,
    peaks,
    weights,
    flags,
    first,
    stride,
    vocabulary,
    words,
    mask_words,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    place = tl.program_id(0)
    record = records + (first + place) * NUM_WORDS
    groups = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_there = columns < vocabulary
    row = logits + tl.load(record + ROW).to(tl.int64) * stride
    numbers = tl.load(row + columns, is_there, other=-float("inf")).to(tl.float32)
    is_bad = (numbers != numbers) | (numbers == float("inf"))  # noqa: PLR0124 - NaN
    is_finite = (numbers > -float("inf")) & (numbers < float("inf"))
    numbers = tl.where(is_bad, -float("inf"), numbers)
    shape = (record, bits, adds, masks, words, mask_words)
    numbers = shaped(numbers, columns, is_there, vocabulary, shape)
    peak = tl.max(numbers, 1)
    out = place.to(tl.int64) * ROOM + groups
    is_group = groups * GROUP < vocabulary
    tl.store(peaks + out, peak, is_group)
    flag = tl.max(is_bad.to(tl.int32), 1) * IS_BAD + tl.max(is_finite.to(tl.int32), 1) * IS_FINITE
    tl.store(flags + out, flag.to(tl.int8), is_group)
    factor = tl.load(record + FACTOR).to(tl.float32, bitcast=True)
    if factor > 0:
        masses = mass(numbers, peak[:, None], factor)
        tl.store(weights + out, tl.sum(masses, 1), is_group)


@triton.jit
def mass(numbers, highest, factor):
    """Return exp((number - highest) · factor), 0 for minus infinity whatever the highest is."""
    highest = tl.where(numbers > -float("inf"), highest, 0.0)
    return tl.exp(numbers * factor - highest * factor)


@triton.jit
def order(numbers):
    """Return integers in the order of fp32 numbers; both zeros are equal."""
    bits = numbers.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(2**31) - bits, bits)
