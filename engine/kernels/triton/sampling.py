"""Sampling on GPUs: greedy, top-k, top-p, min-p; the reference is `engine.kernels.sampling`.

The same draw gives the same token. A row is sampled from its `logit_groups` statistics, and from
another read of the groups that may be above the thresholds. Thresholds are bisected by the order of
floats as integers; there is no sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import Sampled, SamplingMetadata
from . import tuned_tiles
from .launch import arch_of, cdiv, launch
from .logit_groups import (
    FACTOR,
    GROUP,
    IS_BAD,
    IS_FINITE,
    ROW,
    mass,
    measure_groups,
    order,
)
from .logits_processors import prepare_processors, shaped
from .logprobs import compute_logprobs, compute_ranks
from .sampling_inputs import NUM_WORDS, send_metadata, word_offset

DRAW, LOG_MIN_P, TOP_P, TOP_K = map(word_offset, ("draw", "log_min_p", "top_p", "top_k"))
LOWEST = tl.constexpr(-0x7F7FFFFF)  # the order of the lowest number that is finite

__all__ = ["compute_logprobs", "compute_ranks", "sample"]


def sample(logits: Tensor, metadata: SamplingMetadata) -> Sampled:
    """See `SamplingOps.sample`; reads the logits once, and again groups that may be sampled.

    logits `[N, V]` of any float dtype, their rows dense. A row's metadata is sent in 64 bytes.
    """
    rows, vocabulary = logits.shape
    inputs = send_metadata(metadata, vocabulary, logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    is_broken = torch.empty(rows, dtype=torch.bool, device=logits.device)
    for chunk in inputs.chunks:
        shapes = prepare_processors(inputs, chunk, vocabulary)
        count = chunk.stop - chunk.first
        measured = measure_groups(logits, inputs.records, shapes, chunk.first, count)
        config = tuned_tiles.config_for("choose_tokens", arch_of(logits.device))
        launch(
            _choose,
            (count,),
            logits,
            inputs.records,
            *shapes,
            *measured,
            torch.empty_like(measured.peaks, dtype=torch.int32),
            token_ids,
            is_broken,
            chunk.first,
            logits.stride(0),
            vocabulary,
            cdiv(vocabulary, 32),
            shapes.masks.shape[1],
            config=config,
            ROOM=measured.peaks.shape[1],
            GROUP=GROUP,
        )
    return Sampled(token_ids, is_broken)


@triton.jit(do_not_specialize=["first", "words", "mask_words"])
def _choose(
    logits,
    records,
    bits,
    adds,
    masks,
    peaks,
    weights,
    flags,
    listed,
    token_ids,
    is_broken,
    first,
    stride,
    vocabulary,
    words,
    mask_words,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    number = first + tl.program_id(0)
    record = records + number * NUM_WORDS
    row = logits + tl.load(record + ROW).to(tl.int64) * stride
    shape = (record, bits, adds, masks, words, mask_words)
    whole = (row, vocabulary, shape)
    groups = tl.arange(0, ROOM)
    is_group = groups * GROUP < vocabulary
    here = tl.program_id(0).to(tl.int64) * ROOM
    peak = tl.load(peaks + here + groups, is_group, other=-float("inf"))
    flag = tl.load(flags + here + groups, is_group, other=0).to(tl.int32)
    is_bad = (tl.max(flag & IS_BAD, 0) != 0) | (tl.max(flag & IS_FINITE, 0) == 0)
    best = tl.max(peak, 0)
    factor = tl.load(record + FACTOR).to(tl.float32, bitcast=True)
    token = tl.full([], 0, tl.int32)
    if (not is_bad) & (best > -float("inf")):
        if factor > 0:
            weight = tl.load(weights + here + groups, is_group, other=0.0)
            room = (listed + here, weights + here)
            token = _draw(whole, room, groups, peak, weight, best, factor, GROUP, AT_ONCE)
        else:
            group = tl.min(tl.where(peak == best, groups, ROOM), 0)
            columns = group * GROUP + tl.arange(0, GROUP)
            token = tl.min(tl.where(_numbers(columns, whole) == best, columns, vocabulary), 0)
    tl.store(token_ids + number, token.to(tl.int64))
    tl.store(is_broken + number, is_bad)


@triton.jit
def _numbers(columns, whole):
    """Return a row's logits at some columns as they are shaped, in fp32."""
    row, vocabulary, shape = whole
    is_there = columns < vocabulary
    numbers = tl.load(row + columns, is_there, other=0.0).to(tl.float32)
    return shaped(numbers, columns, is_there, vocabulary, shape)


@triton.jit
def _draw(
    whole, room, groups, peak, weight, best, factor, GROUP: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Choose by a draw: cut the row by top-k and min-p, then by top-p, and walk the remainder.

    The remainder of a row is the numbers from an order on, `least`, of which none is below a
    `floor` after scaling.
    """
    record = whole[2][0]
    listed, weights = room
    log_min_p = tl.load(record + LOG_MIN_P).to(tl.float32, bitcast=True)
    top_p = tl.load(record + TOP_P).to(tl.float32, bitcast=True)
    top_k = tl.load(record + TOP_K)
    has_top_k = (top_k > 0) & (top_k < whole[1])
    has_floor = log_min_p > -float("inf")
    floor = best * factor + log_min_p
    keys = order(peak)
    masses = mass(peak, best, factor)
    sums = weight * masses
    least = tl.full([], LOWEST, tl.int32)
    for by_mass in range(2):
        is_cut = has_top_k | has_floor
        goal = top_k.to(tl.float32)
        weighed = tl.full(peak.shape, 1.0, tl.float32)
        if by_mass == 1:
            is_cut = top_p < 1
            goal = tl.sum(sums, 0) * top_p
            weighed = masses
        if is_cut:
            is_left = (keys >= least) & (peak * factor >= floor)
            weighed = tl.where(is_left, weighed, 0.0)
            end = tl.where(has_top_k | (by_mass == 1), order(best), least) + 1
            least = _least_by_peaks(keys, weighed, goal, least, end)
            tl.store(weights + groups, tl.zeros(groups.shape, tl.float32))
            count = _list(listed, groups, is_left & (keys >= least))
            kept = (floor, best, factor, by_mass)
            least = _least_kept(whole, room, count, goal, least, end, kept, GROUP, AT_ONCE)
            sums = tl.load(weights + groups)
    draw = tl.load((record + DRAW).to(tl.pointer_type(tl.float64)))
    # The token at which the running sum of the remainder passes the draw's share of it.
    shares = sums.to(tl.float64)
    covered = tl.cumsum(shares, 0)
    goal = tl.max(covered, 0) * draw
    last = tl.max(tl.where(sums > 0, groups, 0), 0)  # rounding would step past it
    group = tl.min(tl.where((covered > goal) & (sums > 0), groups, last), 0)
    before = tl.sum(tl.where(groups < group, shares, 0.0), 0)
    columns = group * GROUP + tl.arange(0, GROUP)
    numbers = _numbers(columns, whole)
    is_left = (order(numbers) >= least) & (numbers * factor >= floor)
    inside = tl.where(is_left, mass(numbers, best, factor), 0.0)
    covered = before + tl.cumsum(inside.to(tl.float64), 0)
    last = tl.max(tl.where(inside > 0, columns, 0), 0)
    return tl.min(tl.where((covered > goal) & (inside > 0), columns, last), 0)


@triton.jit
def _least_by_peaks(keys, weights, goal, low, high):
    """Return the greatest order below `high` from which on peaks alone reach a goal, or `low`."""
    while low + 1 < high:
        middle = low + _share(low, high, 2)
        has_reached = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= goal
        low = tl.where(has_reached, middle, low)
        high = tl.where(has_reached, high, middle)
    return low


@triton.jit
def _share(low, high, parts):
    """Return a part of a difference, rounded up; the difference may exceed an int32."""
    return ((high.to(tl.int64) - low + parts - 1) // parts).to(tl.int32)


@triton.jit
def _list(listed, groups, is_wanted):
    """Write the wanted groups in order, and return their number."""
    places = tl.cumsum(is_wanted.to(tl.int32), 0)
    tl.debug_barrier()  # others may still read the list before this one
    tl.store(listed + places - 1, groups, is_wanted)
    tl.debug_barrier()
    return tl.max(places, 0)


@triton.jit
def _least_kept(
    whole, room, count, goal, low, high, kept, GROUP: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Return an order from which on numbers of listed groups weigh a goal, and no fewer would do.

    A number weighs its mass, or 1. From `high` on they weigh less than the goal; where they do from
    `low` on, too, all these are left. Each look makes the bounds four times narrower, and more
    where a range is empty; the last finds only one number between them, however often it occurs. It
    leaves the masses of each listed group in `weights`.
    """
    listed, weights = room
    floor, best, factor, by_mass = kept
    is_open = True
    while is_open:
        step = _share(low, high, 4)
        first, second, third = low + step, low + 2 * step, low + 3 * step
        of_first = tl.zeros([AT_ONCE, GROUP], tl.float32)
        of_second, of_third = of_first, of_first
        least = tl.full([AT_ONCE, GROUP], 2**31 - 1, tl.int32)
        most = tl.full([AT_ONCE, GROUP], LOWEST, tl.int32)
        for start in range(0, count, AT_ONCE):
            places = start + tl.arange(0, AT_ONCE)
            is_listed = places < count
            group = tl.load(listed + places, is_listed, other=0)
            columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            numbers = _numbers(tl.where(is_listed[:, None], columns, whole[1]), whole)
            keys = order(numbers)
            is_left = (keys >= low) & (numbers * factor >= floor)
            is_between = is_left & (keys < high)
            least = tl.minimum(least, tl.where(is_between, keys, 2**31 - 1))
            most = tl.maximum(most, tl.where(is_between, keys, LOWEST))
            masses = tl.where(is_left, mass(numbers, best, factor), 0.0)
            tl.store(weights + group, tl.sum(masses, 1), is_listed)
            if by_mass == 0:
                masses = is_left.to(tl.float32)
            of_first += tl.where(keys >= first, masses, 0.0)
            of_second += tl.where(keys >= second, masses, 0.0)
            of_third += tl.where(keys >= third, masses, 0.0)
        lowest, highest = tl.min(least), tl.max(most)
        is_open = lowest < highest
        if is_open:
            num_reached = (tl.sum(of_first) >= goal).to(tl.int32)
            num_reached += (tl.sum(of_second) >= goal).to(tl.int32)
            num_reached += (tl.sum(of_third) >= goal).to(tl.int32)
            low += num_reached * step
            high = tl.minimum(tl.minimum(high, low + step), highest + 1)
            low = tl.maximum(low, lowest)
    tl.debug_barrier()
    return low
