"""Sampling on the CPU: a row at a time, which stays in its core's cache from end to end.

`sample` replaces the one of `kernels.sampling`. A greedy row without logits processors is read
once, unchanged. Any other is widened into a thread's own buffer and processed there; a random one
becomes softmax masses, cut at the thresholds of `cpu.top_p`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import sampling as reference
from ..sampling import Logprobs, Sampled, SamplingMetadata
from .jit_cache import compiled
from .scalars import (
    elements,
    exp,
    larger,
    magnitude,
    narrow,
    order,
    ordered,
    widen,
)
from .simd import LANES
from .thread_pool import atomic_add, parallel_for, pool_size, shared_pool
from .top_p import NUM_FEW, TILE, find_threshold

# Below it e**x counts as zero.
LOWEST = np.float32(-87.0)
ABOVE_ROUNDING = np.float32(1.00001)
# Size of a tile of logits that is skipped as a whole in the search for the best.
FEW_AT_ONCE = 256
# The best are found by insertion, up to the number where a sort is faster.
MOST_INSERTED = 64


def sample(logits: Tensor, metadata: SamplingMetadata) -> Sampled:
    """Sample a token for each row of `logits [N, V]`, which are not modified."""
    rows, vocabulary = logits.shape
    token_ids, is_broken = np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
    threads = min(rows, pool_size())
    tiles = -(-vocabulary // TILE)
    counts_tokens = bool(metadata.presence_penalty.any() or metadata.frequency_penalty.any())
    _sample(
        shared_pool(),
        np.zeros(1, np.int64),
        elements(logits.contiguous()),
        metadata,
        np.empty((threads, tiles * TILE), np.float32),
        np.empty((threads, tiles), np.float32),
        np.empty((threads, tiles), np.float64),
        np.empty((threads, NUM_FEW + LANES), np.float32),
        np.zeros((threads, vocabulary if counts_tokens else 0), np.int32),
        token_ids,
        is_broken,
    )
    return Sampled(torch.from_numpy(token_ids), torch.from_numpy(is_broken))


def compute_logprobs(logits: Tensor, rows: NDArray[np.int64], chosen: Tensor, top: int) -> Logprobs:
    """Return the logprobs of `chosen [M]` in `rows [M]` of `logits [N, V]`, and the `top` best."""
    if top > MOST_INSERTED:
        return reference.compute_logprobs(logits, rows, chosen, top)
    top = min(top, logits.shape[1])
    logprobs = np.empty(len(rows), np.float32)
    top_logprobs, top_ids = np.empty((len(rows), top), np.float32), np.empty((len(rows), top), int)
    arrays = (elements(logits.contiguous()), rows, chosen.numpy())
    _score(shared_pool(), *arrays, logprobs, top_logprobs, top_ids)
    return Logprobs(*(torch.from_numpy(array) for array in (logprobs, top_logprobs, top_ids)))


def compute_ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the rank, from 1, of `chosen [N]` among the tokens of `logits [N, V]`: `[N]`."""
    ranks = np.empty(len(chosen), np.int64)
    _rank(shared_pool(), elements(logits.contiguous()), chosen.numpy(), ranks)
    return torch.from_numpy(ranks)


@compiled
def _sample(
    words: Any,
    num_taken: Any,  # [1], how many rows are taken
    logits: Any,  # [N, V]
    metadata: Any,
    numbers: Any,  # [threads, V in whole tiles] float32
    peaks: Any,  # [threads, tiles] float32
    totals: Any,  # [threads, tiles] float64
    few: Any,  # [threads, NUM_FEW + LANES] float32
    counts: Any,  # [threads, V] int32 zeros, or [threads, 0]
    token_ids: Any,
    is_broken: Any,
) -> None:
    rooms = (numbers, peaks, totals, few, counts)
    parallel_for(
        words,
        len(numbers),
        _sample_rows,
        (num_taken, logits, metadata, *rooms, token_ids, is_broken),
    )


@compiled
def _sample_rows(
    item: Any,
    num_taken: Any,
    logits: Any,
    metadata: Any,
    numbers: Any,
    peaks: Any,
    totals: Any,
    few: Any,
    counts: Any,
    token_ids: Any,
    is_broken: Any,
) -> None:
    """Sample rows until none is left, in the buffers of one thread."""
    row = atomic_add(num_taken, 0, 1)
    while row < len(logits):
        is_plain = metadata.temperature[row] == 0 and not metadata.has_processors[row]
        if is_plain:
            token_ids[row], is_broken[row] = _argmax(logits[row])
        elif _is_only_masked(row, metadata):
            mask = metadata.masks[metadata.mask_rows[row]]
            token_ids[row], is_broken[row] = _argmax_allowed(logits[row], mask)
        else:
            is_broken[row] = _widen(logits[row], numbers[item])
            if not is_broken[row]:
                x = numbers[item]
                _process_logits(logits[row], row, metadata, x, counts[item])
                token = _sample_row(row, metadata, x, peaks[item], totals[item], few[item])
                token_ids[row] = min(token, logits.shape[1] - 1)
        row = atomic_add(num_taken, 0, 1)


@compiled
def _argmax(row: Any) -> Any:
    """Return the argmax, the first of ties, and whether the row is broken."""
    best, size, first = order(row[0]), magnitude(row[0]), 0
    for start in range(0, len(row), TILE):
        tile = row[start : start + TILE]
        highest = order(tile[0])
        for i in range(len(tile)):
            highest = larger(highest, order(tile[i]))
            size = larger(size, magnitude(tile[i]))
        if highest > best:
            best, first = highest, start
    while order(row[first]) != best:
        first += 1
    return first, _is_broken(best, size, row[0])


@compiled
def _is_only_masked(number: Any, metadata: Any) -> Any:
    """Return whether a greedy row has a bitmask, and no other logits processor."""
    return (
        metadata.mask_rows[number] >= 0
        and metadata.temperature[number] == 0
        and metadata.repetition_penalty[number] == 1
        and metadata.presence_penalty[number] == 0
        and metadata.frequency_penalty[number] == 0
        and metadata.bias_starts[number] == metadata.bias_starts[number + 1]
        and metadata.ban_starts[number] == metadata.ban_starts[number + 1]
    )


@compiled
def _argmax_allowed(row: Any, mask: Any) -> Any:
    """Return the argmax of the tokens in a bitmask, or 0, and whether the row is broken."""
    best, size = order(row[0]), magnitude(row[0])
    for i in range(len(row)):
        best = larger(best, order(row[i]))
        size = larger(size, magnitude(row[i]))
    highest, token = order(narrow(np.float32(-np.inf), row[0])), 0
    for place in range(len(mask)):
        word, start = mask[place], place * 32
        if word == 0:
            continue
        part = row[start : start + 32]
        if word == np.uint32(0xFFFFFFFF):
            of_part = order(part[0])
            for i in range(len(part)):
                of_part = larger(of_part, order(part[i]))
            if of_part > highest:
                highest, token = of_part, start
                while order(row[token]) != of_part:
                    token += 1
            continue
        for i in range(len(part)):
            if (word >> np.uint32(i)) & np.uint32(1) and order(part[i]) > highest:
                highest, token = order(part[i]), start + i
    return token, _is_broken(best, size, row[0])


@compiled
def _is_broken(best: Any, size: Any, like: Any) -> Any:
    """Return whether the best of a row is not finite; any NaN counts as the best."""
    infinity = order(narrow(np.float32(np.inf), like))
    return size > infinity or best >= infinity or best <= -infinity


@compiled
def _widen(row: Any, x: Any) -> Any:
    """Write a row to `x` in fp32, padded with minus infinity, and return whether it is broken."""
    best, size = order(row[0]), magnitude(row[0])
    for i in range(len(row)):
        x[i] = widen(row[i])
        best = larger(best, order(row[i]))
        size = larger(size, magnitude(row[i]))
    x[len(row) :] = -np.inf
    return _is_broken(best, size, row[0])


@compiled
def _process_logits(row: Any, number: Any, metadata: Any, x: Any, counts: Any) -> None:
    """Apply penalties, bias, bans and the bitmask to `x`, a copy of the row."""
    ids = metadata.tokens[metadata.slots[number]]
    start, stop = metadata.num_prompt[number], metadata.num_known[number]
    penalty = metadata.repetition_penalty[number]
    if penalty != 1:
        for token in ids[:stop]:
            seen = widen(row[token])  # from the row, so that a repeated token is penalised once
            x[token] = seen / penalty if seen > 0 else seen * penalty
    presence, frequency = metadata.presence_penalty[number], metadata.frequency_penalty[number]
    if presence != 0 or frequency != 0:
        for token in ids[start:stop]:
            counts[token] += 1
        for token in ids[start:stop]:
            if counts[token]:
                x[token] -= presence + frequency * np.float32(counts[token])
                counts[token] = 0
    for place in range(metadata.bias_starts[number], metadata.bias_starts[number + 1]):
        x[metadata.bias_ids[place]] += metadata.bias[place]
    for place in range(metadata.ban_starts[number], metadata.ban_starts[number + 1]):
        x[metadata.ban_ids[place]] = -np.inf
    if metadata.mask_rows[number] >= 0:
        _apply_mask(metadata.masks[metadata.mask_rows[number]], x)


@compiled
def _apply_mask(mask: Any, x: Any) -> None:
    """Ban all tokens whose bit is not set in a bitmask."""
    for place in range(len(mask)):
        word = mask[place]
        if word == np.uint32(0xFFFFFFFF):
            continue
        start = place * 32
        for i in range(start, min(start + 32, len(x))):
            if not (word >> np.uint32(i - start)) & np.uint32(1):
                x[i] = -np.inf


@compiled
def _sample_row(number: Any, metadata: Any, x: Any, peaks: Any, totals: Any, few: Any) -> Any:
    """Sample from the processed logits `x`, which are overwritten by softmax masses."""
    if metadata.temperature[number] == 0:
        return _argmax(x)[0]
    best = _scale(x, np.float32(1) / metadata.temperature[number], peaks)
    highest = ordered(best)
    if not highest > -np.inf:
        return 0  # all are banned
    floor = highest + metadata.log_min_p[number]
    top_k = metadata.top_k[number]
    if 0 < top_k < len(x):
        total = np.float64(len(x))
        least = find_threshold(x, peaks, np.float64(top_k), total, best, few, by_mass=False)
        floor = max(floor, ordered(least))
    total = _weigh(x, peaks, highest, max(floor, highest + LOWEST), totals)
    least = np.int32(1)
    if metadata.top_p[number] < 1:
        goal, all_of_it = total * metadata.top_p[number], order(np.float32(1))
        least = find_threshold(x, peaks, goal, total, all_of_it, few, by_mass=True)
        _weigh_again(x, least, totals)
    return _inverse_cdf(x, totals, least, metadata.draws[number])


@compiled
def _scale(x: Any, factor: Any, peaks: Any) -> Any:
    """Multiply `x` in place, write each tile's greatest number, and return the greatest of all."""
    best = order(np.float32(-np.inf))
    for tile in range(len(peaks)):
        part = x[tile * TILE : (tile + 1) * TILE]
        highest = order(np.float32(-np.inf))
        for i in range(len(part)):
            part[i] *= factor
            highest = larger(highest, order(part[i]))
        peaks[tile] = ordered(highest)
        best = larger(best, highest)
    return best


@compiled
def _weigh(x: Any, peaks: Any, highest: Any, floor: Any, totals: Any) -> Any:
    """Turn scaled logits into softmax masses, zero below a floor, and return their sum.

    Peaks become those of the masses, or a little more.
    """
    total = np.float64(0)
    for tile in range(len(totals)):
        part = x[tile * TILE : (tile + 1) * TILE]
        weight = np.float32(0)
        if peaks[tile] < floor:
            peaks[tile] = 0
            for i in range(len(part)):
                part[i] = 0
        else:
            peaks[tile] = exp(peaks[tile] - highest) * ABOVE_ROUNDING
            for i in range(len(part)):
                mass = exp(part[i] - highest) if part[i] >= floor else np.float32(0)
                part[i] = mass
                weight += mass
        totals[tile] = weight
        total += weight
    return total


@compiled
def _weigh_again(x: Any, least: Any, totals: Any) -> None:
    """Recompute the totals over the masses from an order up."""
    for tile in range(len(totals)):
        if totals[tile] == 0:
            continue
        part = x[tile * TILE : (tile + 1) * TILE]
        weight = np.float32(0)
        for i in range(len(part)):
            weight += part[i] if order(part[i]) >= least else np.float32(0)
        totals[tile] = weight


@compiled
def _inverse_cdf(masses: Any, totals: Any, least: Any, draw: Any) -> Any:
    """Return the token at which the running sum of masses passes a share of their total.

    Only masses of an order from `least` up count.
    """
    goal = 0.0
    for weight in totals:
        goal += weight
    goal *= draw
    last, before, passed = 0, 0.0, 0.0
    for tile in range(len(totals)):
        if totals[tile] > 0:
            last, before = tile, passed
            passed += totals[tile]
            if passed > goal:
                break
    token, covered = 0, np.float64(0)
    for i in range(last * TILE, (last + 1) * TILE):
        if order(masses[i]) >= least:
            token = i  # the last token with mass, in case rounding steps past it
            covered += masses[i]
            if before + covered > goal:
                break
    return token


@compiled
def _score(
    words: Any,
    logits: Any,  # [N, V]
    rows: Any,  # [M]
    chosen: Any,
    logprobs: Any,
    top_logprobs: Any,  # [M, K]
    top_ids: Any,
) -> None:
    arguments = (logits, rows, chosen, logprobs, top_logprobs, top_ids)
    parallel_for(words, len(rows), _score_row, arguments)


@compiled
def _rank(words: Any, logits: Any, chosen: Any, ranks: Any) -> None:
    parallel_for(words, len(chosen), _rank_row, (logits, chosen, ranks))


@compiled
def _rank_row(item: Any, logits: Any, chosen: Any, ranks: Any) -> None:
    row = logits[item]
    logit, rank = widen(row[chosen[item]]), np.int32(1)
    for i in range(len(row)):
        rank += np.int32(widen(row[i]) > logit)
    ranks[item] = rank


@compiled
def _score_row(
    item: Any,
    logits: Any,
    rows: Any,
    chosen: Any,
    logprobs: Any,
    top_logprobs: Any,
    top_ids: Any,
) -> None:
    row = logits[rows[item]]
    bests = np.empty((len(row) + FEW_AT_ONCE - 1) // FEW_AT_ONCE, np.int32)  # of each tile
    for tile in range(len(bests)):
        part = row[tile * FEW_AT_ONCE : (tile + 1) * FEW_AT_ONCE]
        best = order(widen(part[0]))
        for i in range(len(part)):
            best = larger(best, order(widen(part[i])))
        bests[tile] = best
    highest, total = ordered(bests.max()), np.float64(0)
    for tile in range(len(bests)):
        part = row[tile * FEW_AT_ONCE : (tile + 1) * FEW_AT_ONCE]
        weight = np.float32(0)
        for i in range(len(part)):
            weight += exp(widen(part[i]) - highest)
        total += weight
    below = highest + np.float32(np.log(total))
    logprobs[item] = widen(row[chosen[item]]) - below
    if top_ids.shape[1]:
        _find_best(row, bests, top_logprobs[item], top_ids[item])
        for place in range(top_ids.shape[1]):
            top_logprobs[item, place] -= below


@compiled
def _find_best(row: Any, bests: Any, logits: Any, ids: Any) -> None:
    """Write the greatest logits and their ids, the first of those that tie first."""
    count, most = 0, len(ids)
    for tile in range(len(bests)):
        if count == most and not ordered(bests[tile]) > logits[most - 1]:
            continue
        for token in range(tile * FEW_AT_ONCE, min((tile + 1) * FEW_AT_ONCE, len(row))):
            logit = widen(row[token])
            if count == most:
                if not logit > logits[most - 1]:
                    continue
            else:
                count += 1
            place = count - 1
            while place > 0 and logit > logits[place - 1]:
                logits[place], ids[place] = logits[place - 1], ids[place - 1]
                place -= 1
            logits[place], ids[place] = logit, token
