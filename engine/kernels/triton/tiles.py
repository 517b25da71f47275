"""A step's tiles, made on the host: which rows of queries meet which places of which pages.

A tile is some tokens, each with the query heads of one key head, against a run of places. Whatever
a layer's masks are, here they become two numbers for each token: the places that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.kernels.step import Step
from engine.kernels.triton.prefixes import Shared, shared_by_none

Ints = NDArray[np.int64]
# Of `Tiles.tiles`: its entries' begin and count, its list of pages, its places, whether it ends.
TILE_FIELDS = 6
# Of `Tiles.entries`: a token, where its part goes (-1: nowhere, the tile ends), what it sees.
ENTRY_FIELDS = 4
# Of `Tiles.joins`: a token, and the parts that it is joined from, by first and count.
JOIN_FIELDS = 3
# Runs of places are cut at multiples of so many, and into no fewer.
CUT = 64
FEWEST_PLACES = 256


class Kind(NamedTuple):
    """What the tiles of a layer depend on; layers of one kind share them.

    A tile has `wide` or `narrow` rows at most, of which a token takes `group`. `at_once`: into how
    many tiles a step's work is cut where it has fewer, so that the whole card computes.
    """

    group: int
    window: int
    is_causal: bool
    wide: int
    narrow: int
    at_once: int

    @property
    def tokens(self) -> tuple[int, int]:
        """Return how many tokens a wide tile takes, and a narrow one."""
        return self.wide // self.group, self.narrow // self.group


class Limits(NamedTuple):
    """How many tiles, joins and parts there may be."""

    wide: int
    narrow: int
    joins: int
    parts: int

    @classmethod
    def of(cls, kind: Kind, num_tokens: int) -> Limits:
        """Return what suffices for any step of so many tokens, be nothing shared and nothing cut.

        And for all that is cut so that the card computes, and tokens of three parts.
        """
        wide, narrow = kind.tokens
        # A span of wide tiles has more tokens than a narrow one takes, and its last may be short.
        at_most = max(num_tokens // (narrow + 1), 2 * num_tokens // (wide + 1))
        parts = 3 * num_tokens + 2 * kind.at_once * wide
        return cls(at_most + kind.at_once, num_tokens + kind.at_once, num_tokens, parts)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one kind of layers; those that take longest come first of wide and of narrow."""

    wide: NDArray[np.int32]  # [n, TILE_FIELDS]
    narrow: NDArray[np.int32]  # [n, TILE_FIELDS]
    entries: NDArray[np.int32]  # [n, ENTRY_FIELDS]
    joins: NDArray[np.int32]  # [n, JOIN_FIELDS]
    num_parts: int

    @property
    def counts(self) -> Limits:
        """Return how many there are of each."""
        return Limits(len(self.wide), len(self.narrow), len(self.joins), self.num_parts)


class _Rows(NamedTuple):
    """Runs `starts:stops` of tokens in an order, each one's pages, and the places that it meets."""

    starts: Ints
    stops: Ints
    pages: Ints
    firsts: Ints
    lasts: Ints


def lay_out(step: Step, num_tokens: int, kind: Kind, page_size: int, shared: Shared) -> Tiles:
    """Return the tiles of a step that lies on the host, over pages of which some are shared.

    It is filled up to `num_tokens`, with tokens that see nothing.
    """
    sees = _seen(step, num_tokens, kind)
    # A window that ends within what is shared would leave some of a tile's tokens nothing to see.
    if not kind.is_causal or sees[0][: step.num_decodes].any():
        shared = shared_by_none(step.num_decodes)
    rows = _rows(step, num_tokens, page_size, shared)
    tiles = _cut(rows, shared.order, sees, kind, page_size)
    limits = Limits.of(kind, num_tokens)
    if any(count > most for count, most in zip(tiles.counts, limits, strict=True)):
        none = shared_by_none(step.num_decodes)
        uncut = kind._replace(at_once=1)
        rows = _rows(step, num_tokens, page_size, none)
        tiles = _cut(rows, none.order, sees, uncut, page_size)
    return tiles


def _seen(step: Step, num_tokens: int, kind: Kind) -> tuple[Ints, Ints]:
    """Return the first place that each token sees, and the one after the last: `[T]`, `[T]`."""
    positions = step.positions.numpy().astype(np.int64)
    reach = kind.window or np.iinfo(np.int32).max
    if kind.is_causal:
        ends = step.visible_ends.numpy()
    else:
        counts = np.diff(step.query_starts.numpy())
        ends = np.repeat(step.context_lengths.numpy() + counts, counts)
        ends = np.minimum(positions + reach, ends)
    firsts, stops = np.zeros((2, num_tokens), np.int64)
    firsts[: len(positions)] = np.maximum(positions - reach + 1, 0)
    stops[: len(positions)] = ends
    return firsts, stops


def _rows(step: Step, num_tokens: int, page_size: int, shared: Shared) -> _Rows:
    """Return a step's spans, each from where it is alone, its filling, and what decodes share.

    Tokens are in the step's order and, behind it, that of what is shared.
    """
    starts = step.query_starts.numpy().astype(np.int64)
    spans = len(starts) - 1
    firsts = np.zeros(spans + 1, np.int64)
    firsts[: step.num_decodes] = shared.alone_from * page_size
    anywhere = np.full(spans + 1, np.iinfo(np.int64).max)
    pages = step.page_starts.numpy().astype(np.int64)
    return _Rows(
        np.concatenate([starts, num_tokens + shared.starts]),
        np.concatenate([starts[1:], [num_tokens], num_tokens + shared.stops]),
        np.concatenate([pages, pages[shared.order[shared.starts]]]),
        np.concatenate([firsts, shared.firsts * page_size]),
        np.concatenate([anywhere, shared.lasts * page_size]),
    )


def _cut(rows: _Rows, order: Ints, sees: tuple[Ints, Ints], kind: Kind, page_size: int) -> Tiles:
    """Cut rows into tiles by tokens, then by places where there are too few tiles."""
    order = np.concatenate([np.arange(len(sees[0])), order])
    lengths = rows.stops - rows.starts
    most_wide, most_narrow = kind.tokens
    is_wide = lengths > most_narrow
    at_once = np.where(is_wide, most_wide, most_narrow)
    run, number = _repeated(-(-lengths // at_once))
    starts = rows.starts[run] + number * at_once[run]
    stops = np.minimum(starts + at_once[run], rows.stops[run])
    # Along a span both only grow; who shares sees all that is shared.
    firsts = np.maximum(rows.firsts[run], sees[0][order[starts]]) // page_size * page_size
    lasts = np.maximum(np.minimum(rows.lasts[run], sees[1][order[stops - 1]]), firsts)
    places = lasts - firsts
    longest = max(FEWEST_PLACES, -(-int(places.sum()) // kind.at_once))
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
    owner, number = _repeated(stops - starts)
    tokens = order[starts[owner] + number]
    parts, joins = _joined(tokens, len(sees[0]))
    entries = np.stack([tokens, parts, sees[0][tokens], sees[1][tokens]], axis=1)
    counts = stops - starts
    begins = np.cumsum(counts) - counts
    tiles = np.stack([begins, counts, rows.pages[run], firsts, lasts, parts[begins] < 0], axis=1)
    return Tiles(
        tiles[is_wide[run]].astype(np.int32),
        tiles[~is_wide[run]].astype(np.int32),
        entries.astype(np.int32),
        joins.astype(np.int32),
        int(joins[-1, 1:].sum()) if len(joins) else 0,
    )


def _joined(tokens: Ints, num_tokens: int) -> tuple[Ints, Ints]:
    """Return where the part of each entry goes, by its token, and what is joined of these.

    Parts of one token lie after each other; a token of one entry has none.
    """
    counts = np.bincount(tokens, minlength=num_tokens)
    joined = np.flatnonzero(counts > 1)
    ends = np.cumsum(counts[joined])
    parts = np.full(len(tokens), -1)
    entries = np.flatnonzero(counts[tokens] > 1)
    parts[entries[np.argsort(tokens[entries], kind="stable")]] = np.arange(len(entries))
    return parts, np.stack([joined, ends - counts[joined], counts[joined]], axis=1)


def _repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Return each index as often as its count says, and how often it came before."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _rounded(places: Ints) -> Ints:
    return -(-places // CUT) * CUT
