"""A step's tiles: every token meets each place that it sees once, and no other."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.kernels.triton.mutating import Mutation, assert_found
from tidemill.engine.kernels.attention import ANY_PROGRAMS
from tidemill.engine.kernels.shared_prefixes import find_shared_prefixes, no_shared_prefixes
from tidemill.engine.kernels.step import Step
from tidemill.engine.kernels.triton import tiles
from tidemill.engine.kernels.triton.tiles import ProgramLimits, TileCounts, Tiles, TileSpec

PAGE_SIZE = 4
CPU = torch.device("cpu")
# Tokens that were computed before, and those of the step.
Span = tuple[int, int]


def step_of(spans: list[Span], shared: list[int], *, is_seeing_on: bool = False) -> Step:
    """Return a step whose decode `d` has the first `shared[d]` pages of a common list.

    Those without a number have separate pages. With `is_seeing_on` chunks see their whole span.
    """
    counts = [-(-(context + count) // PAGE_SIZE) for context, count in spans]
    pages, fresh = [], 1000
    for number, count in enumerate(counts):
        common = min(shared[number], spans[number][0] // PAGE_SIZE) if number < len(shared) else 0
        pages += [np.arange(common), np.arange(fresh, fresh + count - common)]
        fresh += count
    positions = [np.arange(context, context + count) for context, count in spans]
    ends = [
        np.full(count, context + count) if is_seeing_on else np.arange(context, context + count) + 1
        for context, count in spans
    ]
    num_tokens = sum(map(len, positions))
    return Step.pack(
        sum(count == 1 for _, count in spans),
        CPU,
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.concatenate(positions),
        slots=np.zeros(num_tokens, np.int64),
        query_starts=np.array([0, *accumulate(count for _, count in spans)]),
        context_lengths=np.array([context for context, _ in spans]),
        page_starts=np.array([0, *accumulate(counts)]),
        pages=np.concatenate(pages),
        logit_rows=np.zeros(0, np.int64),
        ends=np.concatenate(ends),
    )


def places_met(
    made: Tiles, kind: TileSpec, step: Step, num_tokens: int
) -> list[list[tuple[int, int, int]]]:
    """Return the places that each token meets in all its tiles, each with its page and its part."""
    pages = step.pages.numpy()
    met: list[list[tuple[int, int, int]]] = [[] for _ in range(num_tokens)]
    for rows, most in ((made.wide, kind.wide), (made.narrow, kind.narrow)):
        for begin, count, list_of_pages, first, last, is_end in rows.tolist():
            assert 0 < count * kind.group <= most
            assert first % PAGE_SIZE == 0
            for token, part, from_place, to_place in made.entries[begin : begin + count].tolist():
                assert is_end == (part < 0)
                for place in range(max(first, from_place), min(last, to_place)):
                    page = int(pages[list_of_pages + place // PAGE_SIZE])
                    met[token].append((place, page, part))
    return met


def check_tiles(
    module: ModuleType, spans: list[Span], shared: list[int], kind: TileSpec, filling: int = 0
) -> None:
    """Check the tiles of a step: their visible keys, their parts, and the limits."""
    step = step_of(spans, shared, is_seeing_on=not (kind.window or kind.chunk) and kind.is_causal)
    num_tokens = step.num_tokens + filling
    found = find_shared_prefixes(step, PAGE_SIZE)
    made = module.plan_tiles(step, num_tokens, kind, PAGE_SIZE, found)
    assert all(
        n <= most
        for n, most in zip(
            made.counts,
            TileCounts.upper_bound(kind, num_tokens, step.num_decodes),
            strict=True,
        )
    )
    met = places_met(made, kind, step, num_tokens)
    starts, page_starts = step.query_starts.tolist(), step.page_starts.tolist()
    reach = kind.window or 10**9
    for number, (context, count) in enumerate(spans):
        for token in range(starts[number], starts[number + 1]):
            position = context + token - starts[number]
            end = int(step.visible_ends[token]) if kind.is_causal else position + reach
            first = max(0, position - reach + 1)
            first = max(first, position - position % kind.chunk) if kind.chunk else first
            seen = range(first, min(end, context + count))
            own = step.pages[page_starts[number] : page_starts[number + 1]].tolist()
            places = sorted((place, page) for place, page, _ in met[token])
            assert places == [(place, own[place // PAGE_SIZE]) for place in seen]
    assert not any(met[step.num_tokens :])
    wide = [made.entries[begin : begin + count, 0] for begin, count in made.wide[:, :2].tolist()]
    assert not wide or min(map(np.min, wide)) < step.num_tokens  # padding alone is not wide
    joined = {token: range(first, first + count) for token, first, count in made.joins.tolist()}
    parts = sorted(part for range_of in joined.values() for part in range_of)
    assert parts == list(range(made.num_parts))
    for token in range(num_tokens):
        of_token = made.entries[made.entries[:, 0] == token][:, 1]
        assert sorted(of_token) == list(joined.get(token, [-1]))


KINDS = st.builds(
    lambda reach, **others: TileSpec(window=reach[0], chunk=reach[1], **others),
    st.sampled_from([(0, 0), (0, 0), (1, 0), (5, 0), (300, 0), (0, 1), (0, 7), (0, 256)]),
    group=st.sampled_from([1, 2, 3, 16]),
    is_causal=st.sampled_from([True, True, False]),
    wide=st.sampled_from([16, 32, 64]),
    narrow=st.just(16),
    at_once=st.sampled_from([1, 3, 20]),
)
DECODES = st.lists(
    st.tuples(st.tuples(st.integers(0, 700), st.just(1)), st.integers(0, 150)), max_size=5
)
CHUNKS = st.lists(st.tuples(st.integers(0, 300), st.integers(2, 70)), max_size=2)


@given(decodes=DECODES, chunks=CHUNKS, kind=KINDS, filling=st.integers(0, 9))
def test_every_token_attends_once_to_its_visible_keys(
    decodes: list[tuple[Span, int]], chunks: list[Span], kind: TileSpec, filling: int
) -> None:
    """Whatever is shared and cut; there are no more tiles than a captured step has room for."""
    spans = [span for span, _ in decodes] + chunks
    if spans:
        check_tiles(tiles, spans, [shared for _, shared in decodes], kind, filling)


def shared_runs(step: Step) -> list[tuple[list[int], int, int]]:
    """Return the decodes that share pages, with the pages."""
    found = find_shared_prefixes(step, PAGE_SIZE)
    runs = zip(found.starts, found.stops, found.firsts, found.lasts, strict=True)
    return [(sorted(found.order[a:b].tolist()), int(c), int(d)) for a, b, c, d in runs]


def test_sequences_that_share_more_stay_grouped_longer() -> None:
    """All run together first, then those that share more, and finally each alone."""
    step = step_of([(100, 1), (400, 1), (395, 1), (400, 1), (18, 1)], [25, 60, 100, 60, 25])
    assert shared_runs(step) == [
        ([0, 1, 2, 3, 4], 0, 4),
        ([0, 1, 2, 3], 4, 25),
        ([1, 2, 3], 25, 60),
    ]
    found = find_shared_prefixes(step, PAGE_SIZE)
    assert found.alone_from.tolist() == [25, 60, 60, 60, 4]


@pytest.mark.parametrize(
    ("contexts", "shared"),
    [([15, 15], [3, 3]), ([40], [10]), ([], []), ([400, 400], [3, 3])],
    ids=["short", "one", "none", "little"],
)
def test_short_prefixes_are_not_shared(contexts: list[int], shared: list[int]) -> None:
    """There are few pages, one sequence, or none."""
    step = step_of([(context, 1) for context in contexts] + [(0, 3)], shared)
    assert shared_runs(step) == []


def test_a_page_that_is_not_full_yet_is_shared_by_none() -> None:
    """The one that a decode writes to."""
    step = step_of([(16, 1), (16, 1), (19, 1)], [5, 5, 5])
    assert shared_runs(step) == [([0, 1, 2], 0, 4)]


def test_more_than_the_limits_is_neither_cut_nor_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has no room for more."""
    kind = TileSpec(2, 0, is_causal=True, wide=32, narrow=16, at_once=20)
    step = step_of([(600, 1), (600, 1)], [100, 100])
    shared = find_shared_prefixes(step, PAGE_SIZE)
    assert tiles.plan_tiles(step, 2, kind, PAGE_SIZE, shared).num_parts > 4
    monkeypatch.setattr(TileCounts, "upper_bound", lambda *_: TileCounts(1, 2, 2, 4))
    made = tiles.plan_tiles(step, 2, kind, PAGE_SIZE, shared)
    plain = tiles.plan_tiles(step, 2, kind._replace(at_once=1), PAGE_SIZE, no_shared_prefixes(2))
    assert made.counts == (0, 2, 0, 0)
    assert np.array_equal(made.narrow, plain.narrow)


@pytest.mark.parametrize(("group", "num_parts"), [(16, 4), (32, 0)])
def test_nothing_is_shared_where_a_tile_is_one_token(group: int, num_parts: int) -> None:
    """Parts would be combined, and no page be read less often."""
    kind = TileSpec(group, 0, is_causal=True, wide=32, narrow=group, at_once=1)
    step = step_of([(100, 1), (100, 1)], [20, 20])
    shared = find_shared_prefixes(step, PAGE_SIZE)
    assert tiles.plan_tiles(step, 2, kind, PAGE_SIZE, shared).num_parts == num_parts


@pytest.mark.parametrize("at_once", [1, 8, 66])
def test_work_is_cut_until_the_card_computes(at_once: int) -> None:
    """A long context among short ones is cut, into pieces of a size; short ones never."""
    kind = TileSpec(4, 0, is_causal=True, wide=128, narrow=16, at_once=at_once)
    step = step_of([(6000, 1), (100, 1), (80, 1)], [])
    made = tiles.plan_tiles(step, 3, kind, PAGE_SIZE, no_shared_prefixes(3))
    places = made.narrow[:, 4] - made.narrow[:, 3]
    assert len(places) == 2 + min(at_once, 24)
    assert (np.diff(places) <= 0).all()
    assert places[0] - places[-3] <= tiles.CUT * len(places)


@pytest.mark.parametrize(
    ("num_decodes", "chunks", "filling"),
    [(494, [(0, 1024)] * 5 + [(512, 400)], 110), (500, [], 12), (1024, [(0, 1024)] * 7, 0)],
)
def test_a_captured_step_has_few_programs_without_a_tile(
    num_decodes: int, chunks: list[Span], filling: int
) -> None:
    """The sizes are those of Qwen3-0.6B at 1024/128 on an H100; by tokens there were 6,210."""
    spec = TileSpec(2, 0, is_causal=True, wide=128, narrow=16, at_once=66)
    step = step_of([(1024 + number % 128, 1) for number in range(num_decodes)] + chunks, [])
    num_tokens = step.num_tokens + filling
    found = find_shared_prefixes(step, PAGE_SIZE)
    counts = tiles.plan_tiles(step, num_tokens, spec, PAGE_SIZE, found).counts
    limits = ProgramLimits.unpack(ProgramLimits.of_step({spec: counts}).packed)
    most = limits.lowered(TileCounts.upper_bound(spec, num_tokens, num_decodes), spec)
    assert all(count <= limit for count, limit in zip(counts, most, strict=True))
    assert most.narrow <= 1.3 * (num_decodes + len(chunks) + spec.at_once)
    assert most.wide <= max(spec.at_once, 2 * counts.wide)
    any_step = ProgramLimits.unpack(ANY_PROGRAMS).lowered(most, spec)
    assert any_step == most


def check_all(module: ModuleType) -> None:
    """Check tiles of some steps."""
    kind = TileSpec(3, 0, is_causal=True, wide=32, narrow=16, at_once=4)
    for changed in (kind, kind._replace(window=5), kind._replace(window=5, is_causal=False)):
        check_tiles(
            module, [(600, 1), (601, 1), (500, 1), (9, 1), (3, 5), (0, 33)], [30, 40], changed, 7
        )
    check_tiles(module, [(9, 1)], [0], kind, 40)  # the padding would fill a wide tile


MISTAKES = [
    Mutation("positions - reach + 1", "positions - reach"),
    Mutation("np.minimum(positions + reach, ends)", "np.minimum(positions + reach + 1, ends)"),
    Mutation("[: step.num_decodes] = shared.alone_from * page_size", "[: step.num_decodes] = 0"),
    Mutation("shared.lasts * page_size", "shared.lasts * page_size + 1"),
    Mutation(
        "np.minimum(starts + at_once[run], rows", "np.minimum(starts + at_once[run] - 1, rows"
    ),
    Mutation("np.minimum(lasts[tile], firsts + each[tile])", "firsts + each[tile] + 1"),
    Mutation("ends - counts[joined], counts[joined]", "ends - counts[joined], counts[joined] - 1"),
    Mutation("counts[tokens] > 1", "counts[tokens] > 2"),
    Mutation(" == spans\n", " == spans + 1\n"),
]


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_found(mistake: Mutation, tmp_path: Path) -> None:
    """A bound that is off by one."""
    assert_found(check_all, tiles, mistake, tmp_path)
