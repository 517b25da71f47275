"""The GPU's attention to latents, interpreted: whole steps against torch's own functions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tests.engine.kernels.paged import CPU, Paged, Piece, Sequences, num_pages, scattered
from tests.engine.kernels.triton.mutating import Mutation, assert_found
from tidemill.engine.kernels.attention import AttentionShape, CapturableBackend
from tidemill.engine.kernels.latent import LatentAttention, LatentBackend, UpProjections
from tidemill.engine.kernels.quantised import FP8
from tidemill.engine.kernels.reference import to_storage
from tidemill.engine.kernels.triton import latent, latent_flash, latent_prefills
from tidemill.engine.kernels.triton.latent import TritonLatentAttention
from tidemill.engine.kernels.triton.tiled import JOINS, WIDE

# Chunks of more than 14 tokens are expanded, or of 20 where latents have odd widths.
NOPE, VALUE = 8, 12
SHAPE = AttentionShape(4, 1, 48, 32, 0.2, has_latent_values=True)
SHAPES = {
    "four heads": SHAPE,
    "one head": replace(SHAPE, num_query_heads=1),
    "odd widths": replace(SHAPE, num_query_heads=3, key_dim=28, value_dim=20),
    "a wide tile of heads": replace(SHAPE, num_query_heads=32),
    "two blocks of heads, one not full": replace(SHAPE, num_query_heads=41),
}
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3}


class StoresAtOnce(TritonLatentAttention):
    """Backend that stores with torch: interpreting a program per token is slow."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend.store`."""
        del value
        pages = self.keys[layer]
        pages.flatten(0, 1)[self._slots.long()] = to_storage(key[:, 0], pages.dtype)


class Steps:
    """Sequences in pages of both backends, with NaN in the GPU's wherever nothing was stored."""

    def __init__(
        self,
        shape: AttentionShape,
        lengths: Sequence[int],
        dtype: torch.dtype = torch.float32,
        beginnings: Sequence[int] = (),
        kept: torch.dtype | None = None,
    ) -> None:
        seed = secrets.randbits(32)
        print(f"seed {seed}")  # noqa: T201 - shown where it fails
        self.sequences = Sequences.random(shape, lengths, dtype, beginnings, seed)
        pages = scattered(self.sequences, LatentAttention.page_size, seed)
        count = num_pages(self.sequences, LatentAttention.page_size)
        self.backend = StoresAtOnce([shape], count, kept or dtype, CPU)
        self.backend.keys[0].view(torch.uint8).fill_(0x7F)
        torch_kept = dtype if kept is None else kept
        reference = LatentAttention([shape], count, torch_kept, CPU)
        self.paged = Paged(self.backend, self.sequences, pages)
        self.reference = Paged(reference, self.sequences, pages)
        heads, rank = shape.num_query_heads, shape.value_dim
        generator = torch.Generator().manual_seed(seed)
        key, value = (
            (torch.randn(heads, width, rank, generator=generator) / 5).to(dtype)
            for width in (NOPE, VALUE)
        )
        self.projections = UpProjections(key, value)
        self.queries = [torch.randn(n, heads, NOPE, generator=generator).to(dtype) for n in lengths]

    def own(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, their rotary parts, and latents `[T, 1, W]` of some pieces."""
        rank = self.sequences.shape.value_dim
        query, rotary, stored = (
            torch.cat([of_all[index][start:stop] for index, start, stop in pieces])
            for of_all in (
                self.queries,
                [query[..., rank:] for query in self.sequences.queries],
                [key.transpose(0, 1) for key in self.sequences.keys],
            )
        )
        return query, rotary, stored

    def store_before(self, pieces: Sequence[Piece]) -> None:
        """Store the contexts of some pieces, whose sequences are not computed."""
        earlier = [(index, 0, start) for index, start, _ in pieces if start]
        for paged in (self.paged, self.reference) if earlier else ():
            paged.backend.prepare(paged.step(earlier, 0))
            stored = self.own(earlier)[2]
            paged.backend.store(0, stored, stored)

    def run(self, paged: Paged, pieces: Sequence[Piece]) -> Tensor:
        """Store and attend some pieces, the decodes first: `[T, H, Dv]`."""
        backend = paged.backend
        assert isinstance(backend, LatentBackend)
        num_decodes = sum(stop - start == 1 for _, start, stop in pieces)
        backend.prepare(paged.step(pieces, num_decodes))
        query, rotary, stored = self.own(pieces)
        backend.store(0, stored, stored)
        return backend.attend_latents(0, query, rotary, self.projections)

    def check(self, *steps: Sequence[Piece]) -> None:
        """Compare steps with the reference; the first one's context is stored, not computed."""
        self.store_before(steps[0])
        for pieces in steps:
            out, wanted = (self.run(paged, pieces) for paged in (self.paged, self.reference))
            bound = BOUNDS[out.dtype]
            torch.testing.assert_close(out, wanted, atol=bound, rtol=10 * bound)


@pytest.mark.parametrize("kind", SHAPES)
def test_steps_give_what_torch_gives(kind: str) -> None:
    """Chunks with a past and without, absorbed and expanded; decodes among them, short and long."""
    Steps(SHAPES[kind], [40, 17, 18, 71]).check(
        [(2, 0, 1), (0, 0, 36), (1, 0, 16)],
        [(0, 36, 37), (2, 1, 2), (1, 16, 17), (3, 0, 70)],
        [(3, 70, 71), (0, 37, 40), (2, 2, 18)],
    )


def test_absorbed_queries_are_attended_as_they_are() -> None:
    """`attend` agrees with plain float64 attention, even for a chunk that would be expanded."""
    steps = Steps(SHAPE, [300, 50])
    sequences = steps.sequences
    rank = SHAPE.value_dim
    for value, key in zip(sequences.values, sequences.keys, strict=True):
        value.copy_(key[..., :rank])
    pieces = [(0, 299, 300), (1, 0, 50)]
    steps.store_before(pieces)
    for (index, start, stop), out in zip(pieces, steps.paged.run(pieces, 1), strict=True):
        wanted = sequences.expected(index)[start:stop]
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["four heads", "two blocks of heads, one not full"])
def test_long_contexts_are_cut_and_joined(kind: str) -> None:
    """A decode, an absorbed chunk and an expanded one have long contexts, next to short ones."""
    steps = Steps(SHAPES[kind], [901, 640, 13])
    steps.check([(0, 900, 901), (2, 0, 1)])
    assert steps.backend.launches & JOINS
    steps = Steps(SHAPES[kind], [301, 320, 13])
    steps.check([(0, 300, 301), (1, 300, 320), (2, 0, 10)])


@pytest.mark.parametrize("heads", [4, 16])
def test_shared_prefixes_of_decodes_are_read_once(heads: int) -> None:
    """Some sequences share all of it, others less, one nothing."""
    steps = Steps(
        replace(SHAPE, num_query_heads=heads),
        [331, 331, 96, 41, 341],
        beginnings=[0, 320, 80, 0, 320],
    )
    steps.check([(0, 330, 331), (1, 330, 331), (2, 95, 96), (3, 40, 41), (4, 340, 341)])
    assert steps.backend.launches == (JOINS if heads == 4 else WIDE | JOINS)


def test_in_fp16_it_is_torchs_up_to_rounding() -> None:
    """Decodes, an absorbed chunk and an expanded one."""
    Steps(SHAPE, [63, 65, 36], torch.float16).check([(1, 64, 65), (0, 50, 63), (2, 0, 36)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_latents_of_eight_bits_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    """Both tiles and expansion read them."""
    Steps(SHAPE, [63, 65, 36], dtype, kept=FP8).check([(1, 64, 65), (0, 50, 63), (2, 0, 36)])


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, FP8], ids=str)
def test_latents_are_stored_at_their_slots_alone(kept: torch.dtype) -> None:
    """The kernel stores columns of a product, rounded as in torch."""
    shape = SHAPES["odd widths"]
    sequences = Sequences.random(shape, [20])
    pages = scattered(sequences, 16)
    count = num_pages(sequences, 16)
    stored = sequences.keys[0][0] * 300
    both = [kind([shape], count, kept, CPU) for kind in (TritonLatentAttention, LatentAttention)]
    for backend in both:
        backend.prepare(Paged(backend, sequences, pages).step([(0, 3, 20)], 0))
        wide = torch.cat([stored, stored], dim=1)[3:, None, : shape.key_dim]
        backend.store(0, wide, wide)
    got, wanted = (backend.keys[0][:count].float() for backend in both)
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    assert not both[0].keys[0][count:].float().any()


def test_little_is_expanded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go in batches, heads in blocks of which the last is not full; decodes among them."""
    monkeypatch.setattr(latent_prefills, "MOST_PLACES", 90)
    monkeypatch.setattr(latent_prefills, "MOST_BYTES", 100 * (24 + VALUE) * 4 * 3)
    most = []
    attend = latent_prefills.attend_tiles

    def noted(*arguments: object, is_wide: bool) -> None:
        keys = arguments[4][1]  # type: ignore[index] # the cache
        most.append(keys.shape[:2])
        attend(*arguments, is_wide=is_wide)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_prefills, "attend_tiles", noted)
    steps = Steps(replace(SHAPE, num_query_heads=5), [40, 90, 41, 34, 8])
    steps.check([(4, 7, 8), (0, 0, 40), (1, 50, 90), (2, 0, 41), (3, 0, 34), (4, 7, 8)][:5])
    assert {places for places, _ in most} == {40, 75, 90}
    assert max(places * heads for places, heads in most) <= 300
    assert len({heads for _, heads in most}) > 1


def test_a_shape_that_does_not_fit_is_left_to_torch() -> None:
    """The latents' width, the rotary part's, or the dtype is unsupported, or it is not a latent."""
    fits = AttentionShape(128, 1, 576, 512, 1.0, has_latent_values=True)
    assert TritonLatentAttention.supports([SHAPE, fits], torch.bfloat16)
    assert not TritonLatentAttention.supports([fits], torch.float64)
    for wrong in (
        replace(fits, key_dim=640, value_dim=576),
        replace(fits, key_dim=640),
        replace(fits, has_latent_values=False),
    ):
        assert not TritonLatentAttention.supports([SHAPE, wrong], torch.bfloat16)


def test_a_captured_step_serves_any_step_of_its_size() -> None:
    """Its lists stay in one place; what would be expanded is absorbed; padding comes to nothing."""
    steps = Steps(SHAPE, [70, 300, 40, 20], beginnings=[0, 64, 0, 0])
    backend = steps.backend
    assert isinstance(backend, CapturableBackend)
    backend.allocate_workspace(48, 2)
    places = set()
    for pieces in (
        [(0, 69, 70), (1, 69, 70), (2, 0, 36)],
        [(1, 299, 300), (3, 0, 20)],
    ):
        steps.store_before(pieces)
        num_decodes = sum(stop - start == 1 for _, start, stop in pieces)
        step = steps.paged.step(pieces, num_decodes)
        query, rotary, stored = steps.own(pieces)
        backend.prepare(replace(step, token_ids=torch.zeros(48), copy_on_host=step))
        with backend.capturing(48, backend.launches):
            arrays = backend._tile_buffers.numbers, *backend._parts
            places.add(tuple(array.data_ptr() for array in arrays))
            backend.store(0, stored, stored)
            padded = [torch.full((48, *part.shape[1:]), torch.nan) for part in (query, rotary)]
            for whole, part in zip(padded, (query, rotary), strict=True):
                whole[: len(part)] = part
            out = backend.attend_latents(0, *padded, steps.projections)
        wanted = steps.run(steps.reference, pieces)
        torch.testing.assert_close(out[: len(wanted)], wanted, atol=1e-5, rtol=1e-4)
        assert not out[len(wanted) :].any()
    assert len(places) == 1


def check_module(module: ModuleType) -> None:
    """Compare a step with torch, with a module in place of the engine's."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "attend_latent_tiles"):
            patch.setattr(latent, "attend_latent_tiles", module.attend_latent_tiles)
        else:
            patch.setattr(latent, "ExpandedSpans", module.ExpandedSpans)
            patch.setattr(latent, "of_spans", module.of_spans)
            patch.setattr(module, "MOST_BYTES", 70 * (16 + VALUE) * 4 * 3)
        try:
            shape = replace(SHAPES["odd widths"], num_query_heads=5)
            Steps(shape, [520, 50, 65], beginnings=[0, 0, 64]).check(
                [(0, 519, 520), (2, 64, 65), (1, 0, 20)], [(1, 20, 50), (2, 30, 63)]
            )
            Steps(replace(shape, num_query_heads=33), [36, 3]).check([(0, 35, 36), (1, 0, 3)])
        except InterpreterError as exc:  # unwritten numbers may be too large
            raise AssertionError from exc


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(
    ("module", "mistake"),
    [
        (latent_flash, Mutation("number >= tl.load", "number + 1 >= tl.load")),
        (latent_flash, Mutation("(rows // group < count)", "(rows // group < count - 1)")),
        (latent_flash, Mutation("(heads < num_heads)", "(heads < num_heads - 1)")),
        (latent_flash, Mutation("block * group + rows", "rows")),
        (latent_flash, Mutation("dims < RANK, angles", "dims < RANK + 1, angles")),
        (latent_flash, Mutation("angles < ROTARY\n", "angles < ROTARY - 1\n")),
        (latent_flash, Mutation("is_place = places < end", "is_place = places < end + 1")),
        (latent_flash, Mutation("places[None, :] >= first", "places[None, :] > first")),
        (latent_flash, Mutation("places[None, :] < stop", "places[None, :] <= stop")),
        (latent_flash, Mutation("+ places % PAGE_SIZE", "+ (places + 1) % PAGE_SIZE")),
        (latent_flash, Mutation("mass * shrink + tl", "mass + tl")),
        (
            latent_flash,
            Mutation("tl.dot(turned, tl.trans(key), scores,", "tl.dot(turned, tl.trans(key),"),
        ),
        (
            latent_prefills,
            Mutation("projections.key[heads]", "projections.key[: len(range(99)[heads])]"),
        ),
        (
            latent_prefills,
            Mutation("heads] = mixed[start : start", "heads] = mixed[0 * start : 0 * start"),
        ),
        (latent_prefills, Mutation("positions.numpy()[tokens]", "positions.numpy()[tokens] - 1")),
        (latent_prefills, Mutation("stored[:, None, rank:]", "stored[:1, None, rank:]")),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else str(value),
)
def test_a_mistake_is_found(module: ModuleType, mistake: Mutation, tmp_path: Path) -> None:
    """A bound that is off by one, heads or places that are others'."""
    assert_found(check_module, module, mistake, tmp_path)
