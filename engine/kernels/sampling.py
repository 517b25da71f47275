"""Sampling of tokens from logits, and their logprobs: the metadata, and the reference in torch.

The host's metadata alone decides what is computed, so nothing here waits for a device. Only top-k
sorts: top-k, min-p and top-p become a threshold, and a random draw inverts the cumulative mass tile
by tile.
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


class PagedTokenIds(NamedTuple):
    """Token ids on a device, in pages like their keys and values.

    The id at place `p` of the sequence in slot `s` is `ids[pages[s, p // size] · size + p % size]`.
    """

    ids: Tensor  # [pages · page_size] int32
    pages: NDArray[np.int32]  # [slots, pages of a sequence], of the host
    page_size: int


class SamplingMetadata(NamedTuple):
    """Sampling parameters of `N` rows, one next token each; arrays of the host.

    A row is greedy if its temperature is 0. If a row `has_processors`, logits processors run first,
    in this order: the repetition penalty (CTRL, Keskar et al. 2019) over its first `num_known`
    tokens, presence and frequency penalty over those after its prompt, logit bias, banned tokens,
    and its grammar bitmask, which limits the sampled tokens: bit `i % 32` of word `i // 32` for
    token `i`. Then comes the temperature, then top-k (0: all) and min-p relative to the likeliest
    token, then top-p over the rest. A tie at a threshold keeps every tied token.

    With `paged_ids` tokens are read on the device, as the host may not know the last ones yet.
    """

    temperature: NDArray[np.float32]  # [N]
    top_k: NDArray[np.int64]  # [N]
    top_p: NDArray[np.float32]  # [N]
    log_min_p: NDArray[np.float32]  # [N]
    draws: NDArray[np.float64]  # [N], in [0, 1)
    has_processors: NDArray[np.bool_]  # [N]
    repetition_penalty: NDArray[np.float32]  # [N]
    presence_penalty: NDArray[np.float32]  # [N]
    frequency_penalty: NDArray[np.float32]  # [N]
    tokens: NDArray[np.int32]  # [slots, L]
    slots: NDArray[np.int64]  # [N], rows of `tokens`
    num_prompt: NDArray[np.int64]  # [N]
    num_known: NDArray[np.int64]  # [N], tokens of prompt and output
    bias_starts: NDArray[np.int64]  # [N + 1], of each row in `bias_ids` and `bias`
    bias_ids: NDArray[np.int64]  # no id twice in a row
    bias: NDArray[np.float32]
    ban_starts: NDArray[np.int64]  # [N + 1], of each row in `ban_ids`
    ban_ids: NDArray[np.int64]
    mask_rows: NDArray[np.int64]  # [N], rows of `masks`; -1 for none
    masks: NDArray[np.uint32]  # [M, words]
    paged_ids: PagedTokenIds | None = None  # never for a CPU's kernels


class Sampled(NamedTuple):
    """Sampled tokens: `token_ids [N]` int64; `is_broken [N]` marks rows of non-finite logits."""

    token_ids: Tensor
    is_broken: Tensor


class Logprobs(NamedTuple):
    """Logprobs of `M` tokens, `[M]`, and of the `K` likeliest in each place, `[M, K]`."""

    logprobs: Tensor
    top_logprobs: Tensor
    top_ids: Tensor


class SamplingOps(Protocol):
    """Sampling functions of one kind of device."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Sampled:
        """Sample a token for each row of `logits [N, V]`, which are not modified.

        A row depends only on its own logits and metadata.
        """

    def compute_logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: Tensor, top: int
    ) -> Logprobs:
        """Return the logprobs of `chosen [M]` in `rows [M]` of `logits [N, V]`, and the `top` best.

        Natural logs in fp32 of the full softmax, the best first, at most one per token.
        """

    def compute_ranks(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the rank, from 1, of `chosen [N]` among the tokens of `logits [N, V]`: `[N]`."""


def greedy_metadata(count: int) -> SamplingMetadata:
    """Return the metadata of `count` greedy rows without logits processors."""
    none, ones = np.zeros(count, np.int64), np.ones(count, np.float32)
    return SamplingMetadata(
        temperature=np.zeros(count, np.float32),
        top_k=none,
        top_p=ones,
        log_min_p=np.full(count, -np.inf, np.float32),
        draws=np.zeros(count),
        has_processors=np.zeros(count, np.bool_),
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
        mask_rows=none - 1,
        masks=np.zeros((0, 0), np.uint32),
    )


def uniform_draws(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), by the SplitMix64 mixing function.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    with np.errstate(over="ignore"):
        state = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, metadata: SamplingMetadata) -> Sampled:
    """See `SamplingOps.sample`: greedy rows without processors in one pass, others in chunks."""
    # max() is vectorised for bfloat16, but argmax() is not: 3.4 against 14.7 ms for 256 x 32k.
    best = logits.max(dim=-1)
    token_ids, is_broken = best.indices, ~best.values.isfinite()
    others = np.flatnonzero((metadata.temperature > 0) | metadata.has_processors)
    for start in range(0, len(others), ROWS_AT_ONCE):
        rows = others[start : start + ROWS_AT_ONCE]
        index = _to_device(logits, rows)
        wide = logits[index].float()
        _process_logits(wide, metadata, rows)
        token_ids[index] = _sample_rows(wide, metadata, rows)
    return Sampled(token_ids, is_broken)


def compute_logprobs(logits: Tensor, rows: NDArray[np.int64], chosen: Tensor, top: int) -> Logprobs:
    """See `SamplingOps.compute_logprobs`."""
    blocks = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        wide = logits[_to_device(logits, rows[block])].float()
        total = wide.logsumexp(dim=-1, keepdim=True)
        logprobs = wide.gather(1, chosen[block, None]) - total
        best = wide.topk(min(top, wide.shape[1]), dim=-1)
        blocks.append((logprobs.squeeze(1), best.values - total, best.indices))
    return Logprobs(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def compute_ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """See `SamplingOps.compute_ranks`."""
    ranks: Tensor = (logits > logits.gather(1, chosen[:, None])).sum(dim=1) + 1
    return ranks


def _process_logits(wide: Tensor, metadata: SamplingMetadata, rows: NDArray[np.int64]) -> None:
    """Apply penalties, bias, bans and bitmasks of `rows [n]` to `wide [n, V]`, in place."""
    if not metadata.has_processors[rows].any():
        return
    slots, prompts, stops = (
        column[rows] for column in (metadata.slots, metadata.num_prompt, metadata.num_known)
    )

    def known(starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the rows in `wide` and the ids of all tokens from `starts` on."""
        counts = stops - starts
        owners = np.repeat(np.arange(len(rows)), counts)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
        if metadata.paged_ids is None:
            ids = _to_device(wide, metadata.tokens[slots[owners], places])
        else:
            kept, pages, size = metadata.paged_ids
            ids = kept[
                _to_device(wide, pages[slots[owners], places // size] * size + places % size)
            ]
        return _to_device(wide, owners), ids.long()

    penalty = metadata.repetition_penalty[rows]
    if (penalty != 1).any():
        places = known(np.zeros_like(prompts))
        seen, factor = wide[places], _to_device(wide, penalty)[places[0]]
        wide[places] = torch.where(seen > 0, seen / factor, seen * factor)
    presence, frequency = metadata.presence_penalty[rows], metadata.frequency_penalty[rows]
    if presence.any() or frequency.any():
        places = known(prompts)
        times = torch.zeros_like(wide)
        times.index_put_(places, torch.ones_like(places[0], dtype=wide.dtype), accumulate=True)
        wide -= (
            _to_device(wide, presence)[:, None] * (times > 0)
            + _to_device(wide, frequency)[:, None] * times
        )
    owners, entries = _entries(metadata.bias_starts, rows)
    wide[_to_device(wide, owners), _to_device(wide, metadata.bias_ids[entries])] += _to_device(
        wide, metadata.bias[entries]
    )
    owners, entries = _entries(metadata.ban_starts, rows)
    wide[_to_device(wide, owners), _to_device(wide, metadata.ban_ids[entries])] = -torch.inf
    masked = np.flatnonzero(metadata.mask_rows[rows] >= 0)
    if len(masked):
        masks = metadata.masks[metadata.mask_rows[rows[masked]]].view(np.int32)
        wide[_to_device(wide, masked)] += mask_bias(_to_device(wide, masks), wide.shape[1])


def mask_bias(masks: Tensor, vocabulary: int) -> Tensor:
    """Return 0 where the bit of a token is set in `masks [n, words]`, else -inf: `[n, V]`."""
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, :vocabulary].bool()
    return torch.zeros(allowed.shape, device=masks.device).masked_fill_(~allowed, -torch.inf)


def _entries(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the owner (index into `rows`) and the flat index of each entry of `rows`."""
    counts = np.diff(starts)[rows]
    owners = np.repeat(np.arange(len(rows)), counts)
    ends = np.cumsum(counts)
    return owners, np.arange(len(owners)) + (starts[rows] - ends + counts)[owners]


def _to_device(like: Tensor, array: NDArray[np.generic]) -> Tensor:
    # A blocking copy would wait for all work queued on the device.
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _sample_rows(wide: Tensor, metadata: SamplingMetadata, rows: NDArray[np.int64]) -> Tensor:
    """Sample for `rows [n]` from their processed fp32 logits, `wide [n, V]` → `[n]`."""
    greedy = metadata.temperature[rows] == 0
    likeliest = wide.max(dim=-1).indices
    if greedy.all():
        return likeliest
    # Greedy rows are computed at temperature 1, and their draws discarded.
    factor = 1 / np.where(greedy, np.float32(1), metadata.temperature[rows])
    scaled = wide * _to_device(wide, factor)[:, None]
    highest = scaled.amax(dim=-1, keepdim=True)
    floor = highest + _to_device(wide, metadata.log_min_p[rows])[:, None]
    top_k, top_p = metadata.top_k[rows], metadata.top_p[rows]
    if top_k.any():
        floor = torch.maximum(floor, _top_k_floor(scaled, top_k))
    mass = (scaled - highest).exp_().masked_fill_(scaled < floor, 0.0)
    if (top_p < 1).any():
        mass.masked_fill_(mass < _top_p_floor(mass, _to_device(wide, top_p)), 0.0)
    return torch.where(
        _to_device(wide, greedy),
        likeliest,
        _inverse_cdf(mass, _to_device(wide, metadata.draws[rows])),
    )


def _top_k_floor(scaled: Tensor, top_k: NDArray[np.int64]) -> Tensor:
    wanted = np.minimum(top_k, scaled.shape[1])
    best = scaled.topk(int(wanted.max()), dim=-1).values
    kth = best.gather(1, _to_device(scaled, wanted - 1).clamp(min=0)[:, None])
    return kth.masked_fill_(_to_device(scaled, wanted == 0)[:, None], -torch.inf)


def _top_p_floor(mass: Tensor, top_p: Tensor) -> Tensor:
    """Bisect, bit by bit, for the greatest mass above which a row covers top-p → `[n, 1]`.

    The nucleus ends with the first token at which the covered mass reaches the goal.
    """
    goal = (mass.sum(dim=-1, dtype=torch.float64) * top_p)[:, None]
    bits = mass.view(torch.int32)  # numbers that are not negative order as their bits
    least = torch.zeros_like(bits[:, :1])
    for bit in range(29, -1, -1):  # no mass is above 1
        trial = least + (1 << bit)
        covered = mass.masked_fill(bits < trial, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
        least = torch.where((covered >= goal) & (top_p < 1)[:, None], trial, least)
    return least.view(torch.float32)


def _inverse_cdf(mass: Tensor, draws: Tensor) -> Tensor:
    """Invert the cumulative mass at `draws`: `[N, V]`, `[N]` → ids `[N]` of non-zero mass."""
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
