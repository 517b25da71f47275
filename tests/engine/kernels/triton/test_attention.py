"""The GPU's attention, interpreted: whole steps against plain attention in float64."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tests.engine.kernels.paged import (
    CPU,
    Paged,
    Piece,
    Sequences,
    biased,
    num_pages,
    scattered,
)
from tests.engine.kernels.triton.mutating import Mutation, assert_found
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.quantised import FP8
from tidemill.engine.kernels.triton import attention, combine, flash, fp8_bits
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.kernels.triton.tiles import TileCounts

SHAPE = AttentionShape(4, 2, 16, 16, 0.25)
SHAPES = {
    "a head each": replace(SHAPE, num_kv_heads=4),
    "sixteen to a key head": replace(SHAPE, num_query_heads=16, num_kv_heads=1),
    "seventeen to a key head": replace(SHAPE, num_query_heads=17, num_kv_heads=1),
    "more to a key head than a wide tile has rows": AttentionShape(40, 1, 8, 8, 0.3),
    "three of odd widths": AttentionShape(6, 2, 24, 8, 0.3),
    "one number": AttentionShape(1, 1, 8, 1, 0.2),
    "the widest": AttentionShape(4, 1, 512, 512, 0.04),
    "window": replace(SHAPE, window=19),
    "window of one": replace(SHAPE, window=1),
    "softcap": replace(SHAPE, softcap=1.5),
    "sinks": replace(SHAPE, has_sinks=True),
    "everything": AttentionShape(6, 2, 8, 16, 0.7, window=20, softcap=2.0, has_sinks=True),
}


class StoresAtOnce(TritonAttention):
    """Backend that stores with torch: interpreting a program per token is slow."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend.store`."""
        slots = self._slots.long()
        places = (slots // self.page_size, slots % self.page_size)
        self.keys[layer].transpose(1, 2)[places] = key.to(self.keys[layer].dtype)
        self.values[layer].transpose(1, 2)[places] = value.to(self.values[layer].dtype)


def paged(
    sequences: Sequences, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Paged, StoresAtOnce]:
    """Return sequences over a backend's pages, with NaN wherever nothing was stored."""
    size = StoresAtOnce.page_size
    backend = StoresAtOnce([sequences.shape], num_pages(sequences, size), dtype, CPU)
    backend.keys[0].fill_(torch.nan)
    backend.values[0].fill_(torch.nan)
    return Paged(backend, sequences, scattered(sequences, size, seed)), backend


def check(
    shape: AttentionShape,
    steps: Sequence[Sequence[Piece]],
    lengths: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    beginnings: Sequence[int] = (),
    wholes: tuple[tuple[int, int], ...] = (),
) -> None:
    """Compare steps with plain attention; tokens that no step computes are stored."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 - shown where it fails
    sequences = Sequences.random(shape, lengths, dtype, beginnings, seed)
    over, backend = paged(replace(sequences, wholes=wholes), dtype, seed)
    store_before(over, backend, steps[0])
    expected = [over.sequences.expected(index) for index in range(len(lengths))]
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    for pieces in steps:
        num_decodes = sum(stop - start == 1 for _, start, stop in pieces)
        outs = over.run(pieces, num_decodes)
        for (index, start, stop), out in zip(pieces, outs, strict=True):
            wanted = expected[index][start:stop]
            torch.testing.assert_close(out.double(), wanted, atol=bound, rtol=bound)


def own(over: Paged, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of some pieces: `[T, Hkv, D]`."""
    all_of = over.sequences
    key = torch.cat([all_of.keys[index][:, start:stop] for index, start, stop in pieces], dim=1)
    value = torch.cat([all_of.values[index][:, start:stop] for index, start, stop in pieces], dim=1)
    return key.transpose(0, 1), value.transpose(0, 1)


def store_before(over: Paged, backend: StoresAtOnce, pieces: Sequence[Piece]) -> None:
    """Store the contexts of some pieces, whose sequences are not computed."""
    earlier = [(index, 0, start) for index, start, _ in pieces if start]
    if not earlier:
        return
    backend.prepare(over.step(earlier, 0))
    backend.store(0, *own(over, earlier))


@pytest.mark.parametrize("kind", SHAPES)
def test_steps_give_plain_attention(kind: str) -> None:
    """Chunks without a past and with one, to the ends of pages and beyond; decodes among them."""
    steps = [
        [(2, 0, 1), (0, 0, 33), (1, 0, 16)],
        [(0, 33, 34), (2, 1, 2), (1, 16, 17), (3, 0, 70)],
        [(3, 70, 71), (0, 34, 40), (2, 2, 18)],
    ]
    check(SHAPES[kind], steps, [40, 17, 18, 71])


@pytest.mark.parametrize(
    ("group", "width", "fits"),
    [(64, 256, True), (32, 512, True), (65, 64, False), (33, 512, False), (1, 520, False)],
)
def test_shapes_whose_tiles_do_not_fit_are_left_to_the_reference(
    group: int, width: int, *, fits: bool
) -> None:
    """They have too many query heads per key head, too wide heads, or both."""
    shape = AttentionShape(2 * group, 2, width, 64, 1.0)
    assert TritonAttention.supports([SHAPE, shape], torch.bfloat16) == fits


@pytest.mark.parametrize("kind", ["everything", "three of odd widths", "sinks"])
def test_in_fp16_it_is_plain_attention_up_to_rounding(kind: str) -> None:
    """Sums are in fp32; tiles are those of cards that round equally."""
    check(SHAPES[kind], [[(1, 64, 65), (0, 30, 63)]], [63, 65], dtype=torch.float16)


@pytest.mark.parametrize("kind", ["a head each", "window", "softcap", "sinks"])
def test_long_contexts_are_cut_and_joined(kind: str) -> None:
    """The contexts are a decode's and a chunk's, next to short ones."""
    check(SHAPES[kind], [[(0, 900, 901), (2, 12, 13), (1, 620, 640)]], [901, 640, 13])


@pytest.mark.parametrize("kind", ["sixteen to a key head", "sinks", "softcap", "window"])
def test_shared_prefixes_of_decodes_are_read_once(kind: str) -> None:
    """Some sequences share all of it, others less, one nothing; a window ends it."""
    steps = [[(0, 330, 331), (1, 330, 331), (2, 95, 96), (3, 40, 41), (4, 340, 341)]]
    lengths, beginnings = [331, 331, 96, 41, 341], [0, 320, 80, 0, 320]
    check(SHAPES[kind], steps, lengths, beginnings=beginnings)


def test_tokens_of_an_image_see_on_to_its_end() -> None:
    """Chunks end where the image does; a window still limits earlier tokens."""
    steps = [[(1, 0, 1), (0, 0, 20)], [(1, 1, 2), (0, 20, 45)]]
    for kind in ("a head each", "window"):
        check(SHAPES[kind], steps, [45, 2], wholes=((3, 20), (30, 41)))
    causal = replace(SHAPES["a head each"], sees_ahead=False)
    check(causal, [[(1, 0, 1), (0, 0, 20)]], [20, 2], wholes=((3, 20),))


@pytest.mark.parametrize("kind", ["sinks", "window"])
def test_bidirectional_tokens_see_the_whole_sequence(kind: str) -> None:
    """Sequences have several lengths, up to the ends of pages and beyond."""
    shape = replace(SHAPES[kind], is_causal=False)
    check(shape, [[(0, 0, 1), (1, 0, 16), (2, 0, 50)]], [1, 16, 50])


def test_a_position_bias_is_added_to_scores_by_distance() -> None:
    """It is added in blocks without masks, too, and after a softcap."""
    for kind in ("a head each", "everything"):
        shape = biased(replace(SHAPES[kind], is_causal=False), 90)
        check(shape, [[(0, 0, 1), (1, 0, 16), (2, 0, 90)]], [1, 16, 90])


def test_hundreds_of_pages_that_all_share_are_met_once() -> None:
    """Each part of them is read by one tile, whatever private pages follow."""
    length, count = 300 * StoresAtOnce.page_size + 3, 3
    shape = AttentionShape(2, 1, 8, 8, 0.3)
    sequences = Sequences.random(shape, [length] * count, beginnings=[length - 3] * count)
    over, backend = paged(sequences)
    pieces = [(index, length - 1, length) for index in range(count)]
    store_before(over, backend, pieces)
    outs = over.run(pieces, count)
    counts = backend._tile_buffers.counts[backend._specs[0]]
    assert counts.wide + counts.narrow < 2 * count + backend._specs[0].at_once
    for index, out in enumerate(outs):
        query = sequences.queries[index][-1].double()
        weights = (query @ sequences.keys[index][0].double().T * shape.scaling).softmax(-1)
        wanted = weights @ sequences.values[index][0].double()
        torch.testing.assert_close(out[0].double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_captured_step_serves_any_step_of_its_size() -> None:
    """Its lists stay in one place; more programs than there are tiles leave at once.

    Tokens of no span, which fill a step up, come to nothing.
    """
    shape, lengths = replace(SHAPE, has_sinks=True), [70, 300, 33, 20]
    sequences = Sequences.random(shape, lengths, beginnings=[0, 64, 0, 0])
    over, backend = paged(sequences)
    steps: list[list[Piece]] = [
        [(0, 69, 70), (1, 69, 70), (2, 0, 30)],
        [(1, 299, 300), (3, 0, 20)],
    ]
    backend.allocate_workspace(40, 2)
    places = set()
    for pieces in steps:
        store_before(over, backend, pieces)
        query = torch.full((40, shape.num_query_heads, shape.key_dim), torch.nan)
        step = over.step(pieces, sum(stop - start == 1 for _, start, stop in pieces))
        query[: step.num_tokens] = torch.cat(
            [sequences.queries[index][start:stop] for index, start, stop in pieces]
        )
        backend.prepare(replace(step, token_ids=torch.zeros(40), copy_on_host=step))
        with backend.capturing(40, backend.all_launches):
            arrays = backend._tile_buffers.numbers, *backend._parts
            places.add(tuple(array.data_ptr() for array in arrays))
            backend.store(0, *own(over, pieces))
            out = backend.attend(0, query, sequences.sinks)
        wanted = torch.cat(
            [sequences.expected(index)[start:stop] for index, start, stop in pieces]
        ).float()
        torch.testing.assert_close(out[: step.num_tokens], wanted, atol=1e-5, rtol=1e-5)
        assert not out[step.num_tokens :].any()
    assert len(places) == 1


@pytest.mark.parametrize(
    ("pieces", "has_wide", "has_joins"),
    [
        ([(0, 69, 70), (1, 69, 70)], False, False),
        ([(1, 69, 70), (0, 0, 30)], True, False),
        ([(1, 599, 600)], False, True),
        ([(1, 599, 600), (0, 0, 30)], True, True),
    ],
    ids=str,
)
def test_a_captured_step_launches_the_kernels_of_its_kind(
    pieces: list[Piece], monkeypatch: pytest.MonkeyPatch, *, has_wide: bool, has_joins: bool
) -> None:
    """There are as many programs as for any step of the kind; padding needs no wide tiles."""
    most = {}
    monkeypatch.setattr(
        attention,
        "attend_tiles",
        lambda _lists, count, *_, is_wide, **_other: most.update({is_wide: count}),
    )
    monkeypatch.setattr(
        attention, "combine", lambda _lists, count, *_: most.update({"joins": count})
    )
    over, backend = paged(Sequences.random(SHAPE, [70, 600]))
    backend.allocate_workspace(64, 2)
    step = over.step(pieces, sum(stop - start == 1 for _, start, stop in pieces))
    backend.prepare(replace(step, token_ids=torch.zeros(64), copy_on_host=step))
    with backend.capturing(64, backend.launches):
        backend.attend(0, torch.zeros(64, SHAPE.num_query_heads, SHAPE.key_dim))
    bound = TileCounts.upper_bound(backend._specs[0], 64, 2)
    assert most == {True: bound.wide * has_wide, False: bound.narrow, "joins": 64 * has_joins}


def check_module(module: ModuleType) -> None:
    """Compare a step with plain attention, with a module in place of the engine's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("attend_tiles", "combine"):
            patch.setattr(attention, name, getattr(module, name, getattr(attention, name)))
        shape = AttentionShape(5, 1, 24, 12, 0.3, has_sinks=True)
        steps = [[(0, 520, 521), (2, 64, 65), (1, 0, 36)]]
        try:
            check(shape, steps, [521, 36, 65])
            check(replace(shape, window=100), [[(0, 200, 206)]], [206])
        except InterpreterError as exc:  # unwritten numbers may be too large
            raise AssertionError from exc


def check_eight_bits(module: ModuleType) -> None:
    """Compare every eight-bit number with torch's conversion, as values that one token sees."""
    shape = AttentionShape(1, 1, 16, 256, 1.0)
    sequences = Sequences.random(shape, [1])
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits.view(FP8).float()
    backend = TritonAttention([shape], 1, FP8, CPU)
    over = Paged(backend, sequences, [np.zeros(1, np.int64)])
    backend.prepare(over.step([(0, 0, 1)], 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend_tiles", module.attend_tiles)
        backend.keys[0].zero_()
        backend.values[0].view(torch.uint8)[0, 0, 0] = bits
        out = backend.attend(0, sequences.queries[0])[0, 0]
    torch.testing.assert_close(out, numbers, atol=0, rtol=0, equal_nan=True)


def test_eight_bit_numbers_are_converted_as_in_torch() -> None:
    """All 256 are tested: small ones, the largest, and NaN."""
    check_eight_bits(flash)


def check_widening(module: ModuleType) -> None:
    """Run the check with the conversion of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "halves_of_e4m3", module.halves_of_e4m3)
        check_eight_bits(flash)


@pytest.mark.parametrize(
    ("check", "module", "mistake"),
    [
        (check_widening, fp8_bits, Mutation("(bits & 0x80) << 8", "(bits & 0x00) << 8")),
        (check_widening, fp8_bits, Mutation("(bits & 0x7F) << 7)", "(bits & 0x3F) << 7)")),
        (check_eight_bits, flash, Mutation("(numbers) * OF_HALVES", "(numbers) * 255.0")),
        (
            check_eight_bits,
            flash,
            Mutation("(numbers & 0x7F) == 0x7F", "(numbers & 0xFF) == 0x7F"),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_mistake_in_widening_is_found(
    check: Callable[[ModuleType], None], module: ModuleType, mistake: Mutation, tmp_path: Path
) -> None:
    """A bit that is lost, another exponent."""
    assert_found(check, module, mistake, tmp_path)


MISTAKES = [
    (flash, Mutation("number >= tl.load", "number + 1 >= tl.load")),
    (flash, Mutation("is_row = rows // group < count", "is_row = rows // group < count - 1")),
    (flash, Mutation("(dims < KEY_DIM)[None, :]", "(dims < KEY_DIM - 1)[None, :]")),
    (flash, Mutation("(dims < KEY_DIM)[:, None]", "(dims < KEY_DIM + 1)[:, None]")),
    (flash, Mutation("is_place = places < end", "is_place = places < end + 1")),
    (flash, Mutation("places[None, :] >= first", "places[None, :] > first")),
    (flash, Mutation("places[None, :] < stop", "places[None, :] <= stop")),
    (flash, Mutation("first_stop = tl.min(", "first_stop = 1 + tl.min(")),
    (flash, Mutation("last_first = tl.max(", "last_first = -99 + tl.max(")),
    (flash, Mutation("places % PAGE_SIZE", "(places + 1) % PAGE_SIZE")),
    (flash, Mutation("mass * shrink + tl.exp2(sink - highest)", "mass * shrink")),
    (combine, Mutation("number >= tl.load", "number + 1 >= tl.load")),
    (combine, Mutation("(part < count)[None, :]", "(part < count - 1)[None, :]")),
    (combine, Mutation("is_head = heads < num_heads", "is_head = heads < num_heads - 1")),
    (
        combine,
        Mutation(
            "is_head[:, None] & (columns < WIDTH)", "is_head[:, None] & (columns < WIDTH - 1)"
        ),
    ),
    (combine, Mutation("(columns < WIDTH)[None, None, :]", "(columns < WIDTH - 1)[None, None, :]")),
    (combine, Mutation("tl.full([HEADS], 1.0", "tl.full([HEADS], 0.0")),
]


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(
    ("module", "mistake"),
    MISTAKES,
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else str(value),
)
def test_a_mistake_is_found(module: ModuleType, mistake: Mutation, tmp_path: Path) -> None:
    """A bound that is off by one, or a sink that is forgotten."""
    assert_found(check_module, module, mistake, tmp_path)
