"""Choosing tokens from rows of logits, and scoring them: what is asked, and the reference in torch.

What the host knows decides what is computed, so nothing here waits for a device. There is no sort
but for top-k: top-k, min-p and top-p become a threshold, and a random choice walks the cumulative
mass tile by tile.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 256
# Rows that are widened to fp32 at once.
ROWS_AT_ONCE = 32


class KeptIds(NamedTuple):
    """The ids of tokens on a device, in pages as their keys and values are.

    That at place `p` of the sequence in slot `s` is `ids[pages[s, p // size] · size + p % size]`.
    """

    ids: Tensor  # [pages · page_size] int32
    pages: NDArray[np.int32]  # [slots, pages of a sequence], of the host
    page_size: int


class Rules(NamedTuple):
    """How the next token of each of `N` rows is chosen; arrays of the host.

    Greedy where the temperature is 0. Where a row `is_shaped` its logits change first, in this
    order: the repetition penalty (CTRL, Keskar et al. 2019) over all its `tokens` that are known,
    presence and frequency over those behind its prompt, bias, bans, and its mask, outside of which
    no token is chosen: bit `i % 32` of word `i // 32` for token `i`. Then comes the temperature,
    then top-k (0: all) and min-p against the likeliest, then top-p over what these leave. A tie at
    a threshold keeps every tied token.

    Where ids are `kept` on the device they are read there, as the host may not know the last yet.
    """

    temperature: NDArray[np.float32]  # [N]
    top_k: NDArray[np.int64]  # [N]
    top_p: NDArray[np.float32]  # [N]
    log_min_p: NDArray[np.float32]  # [N]
    draws: NDArray[np.float64]  # [N], in [0, 1)
    is_shaped: NDArray[np.bool_]  # [N]
    repetition_penalty: NDArray[np.float32]  # [N]
    presence_penalty: NDArray[np.float32]  # [N]
    frequency_penalty: NDArray[np.float32]  # [N]
    tokens: NDArray[np.int32]  # [slots, L]
    slots: NDArray[np.int64]  # [N], whose rows of `tokens`
    num_prompt: NDArray[np.int64]  # [N]
    num_known: NDArray[np.int64]  # [N], the prompt among them
    bias_starts: NDArray[np.int64]  # [N + 1], of each row in `bias_ids` and `bias`
    bias_ids: NDArray[np.int64]  # no id twice in a row
    bias: NDArray[np.float32]
    ban_starts: NDArray[np.int64]  # [N + 1], of each row in `ban_ids`
    ban_ids: NDArray[np.int64]
    mask_of: NDArray[np.int64]  # [N], whose row of `masks`; -1 for none
    masks: NDArray[np.uint32]  # [M, words]
    kept: KeptIds | None = None  # never for a CPU's kernels


class Sampled(NamedTuple):
    """`token_ids [N]` int64; `is_broken [N]` marks rows whose logits were not finite."""

    token_ids: Tensor
    is_broken: Tensor


class Scores(NamedTuple):
    """Log-probabilities of `M` tokens, `[M]`, and of the `K` likeliest in each place, `[M, K]`."""

    logprobs: Tensor
    top_logprobs: Tensor
    top_ids: Tensor


class ChoosesTokens(Protocol):
    """These functions for one kind of device."""

    def choose(self, logits: Tensor, rules: Rules) -> Sampled:
        """Choose a token for each row of `logits [N, V]`, which stay as they are.

        A row depends on nothing but itself and its rules.
        """

    def log_probabilities(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: Tensor, top: int
    ) -> Scores:
        """Score `chosen [M]` in `rows [M]` of `logits [N, V]`, with the `top` best of each.

        Natural logs in fp32 of the full softmax, the best first, no more than there are tokens.
        """


def nothing_asked(count: int) -> Rules:
    """Return the rules of so many rows that are greedy, and not shaped."""
    none, ones = np.zeros(count, np.int64), np.ones(count, np.float32)
    return Rules(
        temperature=np.zeros(count, np.float32),
        top_k=none,
        top_p=ones,
        log_min_p=np.full(count, -np.inf, np.float32),
        draws=np.zeros(count),
        is_shaped=np.zeros(count, np.bool_),
        repetition_penalty=ones,
        presence_penalty=np.zeros(count, np.float32),
        frequency_penalty=np.zeros(count, np.float32),
        tokens=np.zeros((1, 1), np.int32),
        slots=none,
        num_prompt=none,
        num_known=none,
        bias_starts=np.zeros(count + 1, np.int64),
        bias_ids=np.zeros(0, np.int64),
        bias=np.zeros(0, np.float32),
        ban_starts=np.zeros(count + 1, np.int64),
        ban_ids=np.zeros(0, np.int64),
        mask_of=none - 1,
        masks=np.zeros((0, 0), np.uint32),
    )


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), by the SplitMix64 mixing function.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    with np.errstate(over="ignore"):
        state = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(logits: Tensor, rules: Rules) -> Sampled:
    """See `ChoosesTokens.choose`: plain greedy rows in one pass, others a few rows at a time."""
    # max() is vectorised for bfloat16 where argmax() is not: 3.4 against 14.7 ms for 256 x 32k.
    best = logits.max(dim=-1)
    token_ids, is_broken = best.indices, ~best.values.isfinite()
    others = np.flatnonzero((rules.temperature > 0) | rules.is_shaped)
    for start in range(0, len(others), ROWS_AT_ONCE):
        rows = others[start : start + ROWS_AT_ONCE]
        index = _on(logits, rows)
        wide = logits[index].float()
        _shape(wide, rules, rows)
        token_ids[index] = _choose_block(wide, rules, rows)
    return Sampled(token_ids, is_broken)


def log_probabilities(logits: Tensor, rows: NDArray[np.int64], chosen: Tensor, top: int) -> Scores:
    """See `ChoosesTokens.log_probabilities`."""
    blocks = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        wide = logits[_on(logits, rows[block])].float()
        total = wide.logsumexp(dim=-1, keepdim=True)
        logprobs = wide.gather(1, chosen[block, None]) - total
        best = wide.topk(min(top, wide.shape[1]), dim=-1)
        blocks.append((logprobs.squeeze(1), best.values - total, best.indices))
    return Scores(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _shape(wide: Tensor, rules: Rules, rows: NDArray[np.int64]) -> None:
    """Apply penalties, bias, bans and masks of `rows [n]` to `wide [n, V]`, in place."""
    if not rules.is_shaped[rows].any():
        return
    slots, prompts, stops = (
        column[rows] for column in (rules.slots, rules.num_prompt, rules.num_known)
    )

    def known(starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return ids from `starts` on, and the places that their rows have in `wide`."""
        counts = stops - starts
        owners = np.repeat(np.arange(len(rows)), counts)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
        if rules.kept is None:
            ids = _on(wide, rules.tokens[slots[owners], places])
        else:
            kept, pages, size = rules.kept
            ids = kept[_on(wide, pages[slots[owners], places // size] * size + places % size)]
        return _on(wide, owners), ids.long()

    penalty = rules.repetition_penalty[rows]
    if (penalty != 1).any():
        places = known(np.zeros_like(prompts))
        seen, factor = wide[places], _on(wide, penalty)[places[0]]
        wide[places] = torch.where(seen > 0, seen / factor, seen * factor)
    presence, frequency = rules.presence_penalty[rows], rules.frequency_penalty[rows]
    if presence.any() or frequency.any():
        places = known(prompts)
        times = torch.zeros_like(wide)
        times.index_put_(places, torch.ones_like(places[0], dtype=wide.dtype), accumulate=True)
        wide -= _on(wide, presence)[:, None] * (times > 0) + _on(wide, frequency)[:, None] * times
    owners, entries = _entries(rules.bias_starts, rows)
    wide[_on(wide, owners), _on(wide, rules.bias_ids[entries])] += _on(wide, rules.bias[entries])
    owners, entries = _entries(rules.ban_starts, rows)
    wide[_on(wide, owners), _on(wide, rules.ban_ids[entries])] = -torch.inf
    masked = np.flatnonzero(rules.mask_of[rows] >= 0)
    if len(masked):
        masks = rules.masks[rules.mask_of[rows[masked]]].view(np.int32)
        wide[_on(wide, masked)] += _barred(_on(wide, masks), wide.shape[1])


def _barred(masks: Tensor, vocabulary: int) -> Tensor:
    """Return 0 where the bit of a token is set in `masks [n, words]`, else -inf: `[n, V]`."""
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, :vocabulary].bool()
    return torch.zeros(allowed.shape, device=masks.device).masked_fill_(~allowed, -torch.inf)


def _entries(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return whose entries of `rows` are which: places in `rows`, places behind `starts`."""
    counts = np.diff(starts)[rows]
    owners = np.repeat(np.arange(len(rows)), counts)
    ends = np.cumsum(counts)
    return owners, np.arange(len(owners)) + (starts[rows] - ends + counts)[owners]


def _on(like: Tensor, array: NDArray[np.generic]) -> Tensor:
    # Else the copy would wait for all that the device has yet to do.
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _choose_block(wide: Tensor, rules: Rules, rows: NDArray[np.int64]) -> Tensor:
    """Choose for `rows [n]` from their fp32 logits after shaping, `wide [n, V]` → `[n]`."""
    greedy = rules.temperature[rows] == 0
    likeliest = wide.max(dim=-1).indices
    if greedy.all():
        return likeliest
    # Greedy rows ride along at temperature 1.
    factor = 1 / np.where(greedy, np.float32(1), rules.temperature[rows])
    scaled = wide * _on(wide, factor)[:, None]
    highest = scaled.amax(dim=-1, keepdim=True)
    floor = highest + _on(wide, rules.log_min_p[rows])[:, None]
    top_k, top_p = rules.top_k[rows], rules.top_p[rows]
    if top_k.any():
        floor = torch.maximum(floor, _top_k_floor(scaled, top_k))
    mass = (scaled - highest).exp_().masked_fill_(scaled < floor, 0.0)
    if (top_p < 1).any():
        mass.masked_fill_(mass < _top_p_floor(mass, _on(wide, top_p)), 0.0)
    return torch.where(_on(wide, greedy), likeliest, _walk(mass, _on(wide, rules.draws[rows])))


def _top_k_floor(scaled: Tensor, top_k: NDArray[np.int64]) -> Tensor:
    wanted = np.minimum(top_k, scaled.shape[1])
    best = scaled.topk(int(wanted.max()), dim=-1).values
    kth = best.gather(1, _on(scaled, wanted - 1).clamp(min=0)[:, None])
    return kth.masked_fill_(_on(scaled, wanted == 0)[:, None], -torch.inf)


def _top_p_floor(mass: Tensor, top_p: Tensor) -> Tensor:
    """Find the greatest number from which on up the masses reach their goal, bit by bit → [n, 1].

    The nucleus ends with the first token at which the covered mass reaches it.
    """
    goal = (mass.sum(dim=-1, dtype=torch.float64) * top_p)[:, None]
    bits = mass.view(torch.int32)  # numbers that are not negative order as their bits
    least = torch.zeros_like(bits[:, :1])
    for bit in range(29, -1, -1):  # no mass is above 1
        trial = least + (1 << bit)
        covered = mass.masked_fill(bits < trial, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
        least = torch.where((covered >= goal) & (top_p < 1)[:, None], trial, least)
    return least.view(torch.float32)


def _walk(mass: Tensor, draws: Tensor) -> Tensor:
    """Invert the cumulative mass at `draws`: `[N, V]`, `[N]` → ids `[N]`, never one of no mass."""
    rows, vocabulary = mass.shape
    if vocabulary % TILE:
        mass = torch.nn.functional.pad(mass, (0, -vocabulary % TILE))
    padded = mass.view(rows, -1, TILE)
    tiles = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [N, tiles]
    goal = draws * tiles[:, -1]
    tile = torch.searchsorted(tiles, goal[:, None], right=True).clamp(max=tiles.shape[1] - 1)
    before = torch.where(tile > 0, tiles.gather(1, (tile - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, tile[:, :, None].expand(-1, -1, TILE)).squeeze(1)  # [N, TILE]
    covered = inside.cumsum(dim=-1, dtype=torch.float64)
    offset = torch.searchsorted(covered, goal[:, None] - before, right=True)
    # Rounding may step past the last token that has mass: stay on it.
    last = (inside > 0).long().mul(torch.arange(TILE, device=mass.device)).amax(dim=-1)
    return (tile.squeeze(1) * TILE + torch.minimum(offset.squeeze(1), last)).clamp(
        max=vocabulary - 1
    )
