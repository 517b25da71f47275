"""Tile plan of a step's attention, made on the host: rows of queries by places of pages.

A tile is some tokens, each with the query heads of one key head, against a run of places. Long
contexts are split over several tiles (split-KV); shared prefixes get tiles of many sequences. All
masks of a layer become two numbers for each token: the first place that it sees, and the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..attention import PROGRAM_BITS
from ..shared_prefixes import SharedPrefixes, no_shared_prefixes
from ..step import Step

Ints = NDArray[np.int64]
# Fields of a tile: its entries' begin and count, its page list, first place and end, is unsplit.
TILE_FIELDS = 6
# Fields of `Tiles.entries`: a token, the index of its part (-1: unsplit), the first place, the end.
ENTRY_FIELDS = 4
# Fields of `Tiles.joins`: a token, and the parts that are combined for it, by first and count.
JOIN_FIELDS = 3
# Split-KV: places are split at multiples of CUT, into parts of FEWEST_PLACES at least.
CUT = 64
FEWEST_PLACES = 256
# Sizes of captured grids per octave. Wide tiles are few, and joins small.
SIZES_AN_OCTAVE = 4
# Bits of each number in `ProgramLimits.packed`.
LIMIT_BITS = PROGRAM_BITS // 3


class TileSpec(NamedTuple):
    """Spec of a layer's tiles; layers of the same spec share them.

    A tile has `wide` or `narrow` rows at most, of which a token takes `group`. `at_once`: the
    number of tiles that a smaller step is split into, so that the whole GPU computes.
    """

    group: int
    window: int
    is_causal: bool
    wide: int
    narrow: int
    at_once: int
    chunk: int = 0
    sees_ahead: bool = True

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the most tokens of a wide tile, and of a narrow one."""
        return self.wide // self.group, self.narrow // self.group


class TileCounts(NamedTuple):
    """Counts of tiles, of tokens to combine (`joins`), and of their parts."""

    wide: int
    narrow: int
    joins: int
    parts: int

    @classmethod
    def upper_bound(
        cls, spec: TileSpec, num_tokens: int, num_decodes: int, num_spans: int | None = None
    ) -> TileCounts:
        """Return the counts for any step of this size that shares and splits nothing.

        It adds `at_once` splits, and three parts per decode. Splits add at most `at_once` tiles,
        which are parts of at most twice as many; and only decodes share prefixes, where a tile has
        several of them. Without decodes, a step of at most `num_spans` has a narrow tile for each,
        and those of its padding.
        """
        wide, narrow = spec.tokens
        # A span of wide tiles has more tokens than a narrow tile, and its last one may be short.
        at_most = max(num_tokens // (narrow + 1), 2 * num_tokens // (wide + 1))
        parts = 3 * num_decodes * (wide > 1) + 2 * spec.at_once * wide
        num_narrow = num_tokens
        if num_spans is not None:
            num_narrow = min(num_narrow, num_spans + -(-num_tokens // narrow))
        return cls(at_most + spec.at_once, num_narrow + spec.at_once, num_tokens, parts)


class ProgramLimits(NamedTuple):
    """Limits on a step's wide tiles, narrow tiles and joins, so that few programs have none.

    Each is the number of a size, `at_once` and up; steps of equal limits share a graph.
    """

    wide: int
    narrow: int
    joins: int

    @classmethod
    def of_step(cls, counts: Mapping[TileSpec, TileCounts]) -> ProgramLimits:
        """Return the lowest limits for these counts of tiles."""
        each = [
            (
                _size_number(of_spec.wide, spec, SIZES_AN_OCTAVE),
                _size_number(of_spec.narrow, spec),
                _size_number(of_spec.joins, spec, SIZES_AN_OCTAVE),
            )
            for spec, of_spec in counts.items()
        ]
        return cls(*map(max, zip(*each, strict=True))) if each else cls(0, 0, 0)

    @classmethod
    def unpack(cls, packed: int) -> ProgramLimits:
        """Return the limits of a `packed` number."""
        return cls(*(packed >> LIMIT_BITS * n & (1 << LIMIT_BITS) - 1 for n in range(3)))

    @property
    def packed(self) -> int:
        """Return one number for all."""
        return sum(number << LIMIT_BITS * n for n, number in enumerate(self))

    def lowered(self, most: TileCounts, spec: TileSpec) -> TileCounts:
        """Return the upper bound of a spec's counts, lowered to these limits."""
        return most._replace(
            wide=min(most.wide, _size(self.wide, spec)),
            narrow=min(most.narrow, _size(self.narrow, spec)),
            joins=min(most.joins, _size(self.joins, spec)),
        )


def _size(number: int, spec: TileSpec) -> int:
    octave, place = divmod(number, SIZES_AN_OCTAVE)
    return -(-(spec.at_once * (SIZES_AN_OCTAVE + place)) // SIZES_AN_OCTAVE) << octave


def _size_number(count: int, spec: TileSpec, stride: int = 1) -> int:
    number = 0
    while _size(number, spec) < count:
        number += stride
    return number


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one spec, wide and narrow; the longest of each come first."""

    wide: NDArray[np.int32]  # [n, TILE_FIELDS]
    narrow: NDArray[np.int32]  # [n, TILE_FIELDS]
    entries: NDArray[np.int32]  # [n, ENTRY_FIELDS]
    joins: NDArray[np.int32]  # [n, JOIN_FIELDS]
    num_parts: int

    @property
    def counts(self) -> TileCounts:
        """Return the counts of each."""
        return TileCounts(len(self.wide), len(self.narrow), len(self.joins), self.num_parts)


class _Rows(NamedTuple):
    """Runs `starts:stops` of ordered tokens, the pages of each, and its range of places.

    Padding has narrow tiles unless others are wide: a step does not need wide tiles because of it.
    """

    starts: Ints
    stops: Ints
    pages: Ints
    firsts: Ints
    lasts: Ints
    is_padding: NDArray[np.bool]


def plan_tiles(
    step: Step, num_tokens: int, spec: TileSpec, page_size: int, shared: SharedPrefixes
) -> Tiles:
    """Plan the tiles of a step, which is on the host, given its shared prefixes.

    The step is padded to `num_tokens` with tokens that see nothing.
    """
    sees = _visible_ranges(step, num_tokens, spec)
    # A window that begins within the shared prefix would leave some of a tile's rows empty. With
    # one token per tile nothing would be saved.
    if not spec.is_causal or spec.tokens[0] == 1 or sees[0][: step.num_decodes].any():
        shared = no_shared_prefixes(step.num_decodes)
    rows = _rows(step, num_tokens, page_size, shared)
    tiles = _cut(rows, shared.order, sees, spec, page_size)
    limits = TileCounts.upper_bound(spec, num_tokens, step.num_decodes)
    if any(count > most for count, most in zip(tiles.counts, limits, strict=True)):
        none = no_shared_prefixes(step.num_decodes)
        uncut = spec._replace(at_once=1)
        rows = _rows(step, num_tokens, page_size, none)
        tiles = _cut(rows, none.order, sees, uncut, page_size)
    return tiles


def _visible_ranges(step: Step, num_tokens: int, spec: TileSpec) -> tuple[Ints, Ints]:
    """Return each token's first visible place, and the one after its last: `[T]`, `[T]`."""
    positions = step.positions.numpy()
    firsts, stops = np.zeros((2, num_tokens), np.int64)
    own_firsts, own_stops = firsts[: len(positions)], stops[: len(positions)]
    if spec.is_causal:
        own_stops[:] = step.for_layer(sees_ahead=spec.sees_ahead).visible_ends.numpy()
    else:
        own_stops[:] = step.span_ends.numpy()
    if spec.window:
        np.maximum(positions - spec.window + 1, 0, out=own_firsts)
        if not spec.is_causal:
            np.minimum(positions.astype(np.int64) + spec.window, own_stops, out=own_stops)
    if spec.chunk:
        np.maximum(positions // spec.chunk * spec.chunk, own_firsts, out=own_firsts)
    return firsts, stops


def _rows(step: Step, num_tokens: int, page_size: int, shared: SharedPrefixes) -> _Rows:
    """Return a step's spans from the end of their shared prefix, the padding, and the prefixes.

    Tokens are in the step's order, followed by those of `shared.order`.
    """
    starts = step.query_starts.numpy().astype(np.int64)
    spans = len(starts) - 1
    firsts = np.zeros(spans + 1, np.int64)
    firsts[: step.num_decodes] = shared.alone_from * page_size
    anywhere = np.full(spans + 1, np.iinfo(np.int64).max)
    pages = step.page_starts.numpy().astype(np.int64)
    is_padding = np.arange(spans + 1 + len(shared.starts)) == spans
    return _Rows(
        np.concatenate([starts, num_tokens + shared.starts]),
        np.concatenate([starts[1:], [num_tokens], num_tokens + shared.stops]),
        np.concatenate([pages, pages[shared.order[shared.starts]]]),
        np.concatenate([firsts, shared.firsts * page_size]),
        np.concatenate([anywhere, shared.lasts * page_size]),
        is_padding,
    )


def _cut(
    rows: _Rows, order: Ints, sees: tuple[Ints, Ints], spec: TileSpec, page_size: int
) -> Tiles:
    """Cut rows into tiles by tokens, then by places (split-KV) if there are too few tiles."""
    order = np.concatenate([np.arange(len(sees[0])), order])
    lengths = rows.stops - rows.starts
    most_wide, most_narrow = spec.tokens
    is_wide = lengths > most_narrow
    is_wide &= ~rows.is_padding | (is_wide & ~rows.is_padding).any()
    at_once = np.where(is_wide, most_wide, most_narrow)
    run, number = _repeated(-(-lengths // at_once))
    starts = rows.starts[run] + number * at_once[run]
    stops = np.minimum(starts + at_once[run], rows.stops[run])
    # Along a span both only increase; members of a shared prefix see all of it.
    firsts = np.maximum(rows.firsts[run], sees[0][order[starts]]) // page_size * page_size
    lasts = np.maximum(np.minimum(rows.lasts[run], sees[1][order[stops - 1]]), firsts)
    places = lasts - firsts
    longest = max(FEWEST_PLACES, -(-int(places.sum()) // spec.at_once))
    cuts = np.maximum(-(-places // longest), 1)
    each = _rounded(-(-places // cuts))
    cuts = np.maximum(-(-places // np.maximum(each, 1)), 1)
    tile, number = _repeated(cuts)
    starts, stops, run = starts[tile], stops[tile], run[tile]
    firsts = firsts[tile] + number * each[tile]
    lasts = np.minimum(lasts[tile], firsts + each[tile])
    heaviest = np.argsort(firsts - lasts, kind="stable")
    starts, stops, run, firsts, lasts = (
        column[heaviest] for column in (starts, stops, run, firsts, lasts)
    )
    counts = stops - starts
    ends = np.cumsum(counts)
    begins = ends - counts
    tokens = order[np.arange(counts.sum()) + np.repeat(starts - begins, counts)]
    parts, joins = _assign_parts(tokens, len(sees[0]))
    entries = np.empty((len(tokens), ENTRY_FIELDS), np.int32)
    for field, column in enumerate((tokens, parts, sees[0][tokens], sees[1][tokens])):
        entries[:, field] = column
    tiles = np.stack([begins, counts, rows.pages[run], firsts, lasts, parts[begins] < 0], axis=1)
    return Tiles(
        tiles[is_wide[run]].astype(np.int32),
        tiles[~is_wide[run]].astype(np.int32),
        entries,
        joins.astype(np.int32),
        int(joins[-1, 1:].sum()) if len(joins) else 0,
    )


def _assign_parts(tokens: Ints, num_tokens: int) -> tuple[Ints, Ints]:
    """Return the part index of each entry, by its token, and the tokens to combine.

    Parts of one token are contiguous; a token with one entry has none.
    """
    if len(tokens) == num_tokens:  # every token has an entry
        return np.full(num_tokens, -1), np.zeros((0, JOIN_FIELDS), np.int64)
    counts = np.bincount(tokens, minlength=num_tokens)
    joined = np.flatnonzero(counts > 1)
    ends = np.cumsum(counts[joined])
    parts = np.full(len(tokens), -1)
    entries = np.flatnonzero(counts[tokens] > 1)
    parts[entries[np.argsort(tokens[entries], kind="stable")]] = np.arange(len(entries))
    return parts, np.stack([joined, ends - counts[joined], counts[joined]], axis=1)


def _repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Return each index as often as its count, and how often it came before."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _rounded(places: Ints) -> Ints:
    return -(-places // CUT) * CUT
