"""Every attention backend, against plain attention in float64, over random runs of mixed steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.kernels.paged import (
    CPU,
    Paged,
    Piece,
    Sequences,
    biased,
    num_pages,
    scattered,
)
from tests.engine.kernels.rows_backend import RowsAttention
from tests.long_parameters import with_long
from tidemill.engine.kernels import backends
from tidemill.engine.kernels import elementwise as reference_blocks
from tidemill.engine.kernels import experts as reference_experts
from tidemill.engine.kernels.attention import (
    AttentionBackend,
    AttentionBackendType,
    AttentionShape,
    HeadNorms,
)
from tidemill.engine.kernels.backends import (
    choose_backend,
    choose_elementwise,
    choose_experts,
    limit_torch_threads,
    reference_kernels,
)
from tidemill.engine.kernels.cpu import elementwise as cpu_blocks
from tidemill.engine.kernels.cpu.attention import CpuAttention
from tidemill.engine.kernels.latent import LatentAttention
from tidemill.engine.kernels.quantised import FP8
from tidemill.engine.kernels.reference import ReferenceAttention
from tidemill.engine.kernels.triton import elementwise as triton_blocks
from tidemill.engine.kernels.triton import experts as triton_experts
from tidemill.engine.kernels.triton.attention import TritonAttention
from tidemill.engine.kernels.triton.latent import TritonLatentAttention

Makes = Callable[..., ReferenceAttention | RowsAttention | CpuAttention | TritonAttention]
BACKENDS: dict[str, tuple[Makes, int]] = {
    "reference": (ReferenceAttention, 16),
    "reference, odd pages": (partial(ReferenceAttention, page_size=5), 5),
    "cpu": (CpuAttention, 16),
    "a custom layout": (RowsAttention, 8),
    "triton": (TritonAttention, 16),
}
# Triton's kernels are interpreted, which is slow: see triton/test_attention.py for more of them.
QUICK = [name for name in BACKENDS if name != "triton"]
COPYING = {"reference", "reference, odd pages", "cpu"}
GROUPED = AttentionShape(6, 2, 16, 16, 0.25)
SHAPES = {
    "full": AttentionShape(4, 4, 16, 16, 0.25),
    "grouped": GROUPED,
    "one key head": AttentionShape(3, 1, 8, 8, 0.5),
    "one head of one value": AttentionShape(1, 1, 8, 1, 0.2),
    "wide values": AttentionShape(4, 2, 8, 24, 0.3),
    "narrow values": AttentionShape(9, 3, 24, 8, 0.3, window=19),
    "window within a page": replace(GROUPED, window=5),
    "window over pages": replace(GROUPED, window=37),
    "window of one": replace(GROUPED, window=1),
    "chunks": replace(GROUPED, chunk=21),
    "softcap": replace(GROUPED, softcap=1.5),
    "sinks": replace(GROUPED, has_sinks=True),
    "everything": AttentionShape(6, 2, 8, 16, 0.7, window=20, softcap=2.0, has_sinks=True),
}
# Pages of another size and a custom layout: a backend's choices, tested with the first kinds.
CHOICES = {"reference, odd pages", "a custom layout"}
MANY = [
    pytest.param(name, kind, marks=[pytest.mark.long] if name in CHOICES else [])
    for name in QUICK
    for kind in SHAPES
    if kind not in {"grouped", "window over pages", "everything"}
]
FEW = [(name, kind) for name in QUICK for kind in ("grouped", "window over pages", "everything")]
CASES = [
    (name, kind) for name in BACKENDS for kind in SHAPES if name in QUICK or kind == "everything"
]
# In bf16 a short chunk's weights are rounded before they meet the values.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def made(
    name: str, sequences: Sequences, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Paged:
    """Return a backend over which sequences are scattered, NaN wherever nothing was stored."""
    make, page_size = BACKENDS[name]
    backend = make([sequences.shape], num_pages(sequences, page_size), dtype, CPU)
    assert backend.page_size == page_size
    backend.keys[0].fill_(torch.nan)
    backend.values[0].fill_(torch.nan)
    return Paged(backend, sequences, scattered(sequences, page_size, seed))


def check_random_run(
    name: str,
    shape: AttentionShape,
    seed: int,
    dtype: torch.dtype = torch.float32,
    longest: int = 300,
) -> None:
    """Compute random sequences in random steps and compare each token with plain attention.

    Sequence 0 comes first, so that others may share its pages without computing them, and copy the
    beginning of another page if the backend supports that.
    """
    rng = random.Random(seed)
    size = BACKENDS[name][1]
    lengths = [rng.choice([1, 2, size - 1, size, size + 1, rng.randint(1, 70)]) for _ in range(5)]
    lengths[0] = rng.choice([2 * size, 3 * size + 1, longest])
    unit = 1 if name in COPYING and rng.random() < 0.5 else size
    shared = [0] + [
        rng.randint(0, (min(length, lengths[0]) - 1) // unit) * unit for length in lengths[1:]
    ]
    sequences = Sequences.random(shape, lengths, dtype, shared)
    paged = made(name, sequences, dtype, seed)
    copying = {index for index, count in enumerate(shared) if count % size}
    expected = [sequences.expected(index) for index in range(len(lengths))]
    done = list(shared)

    def run(pieces: list[Piece]) -> None:
        num_decodes = rng.randint(0, sum(stop - start == 1 for _, start, stop in pieces))
        pieces.sort(key=lambda piece: piece[2] - piece[1] > 1)
        new = {index for index, start, _ in pieces if start == shared[index]} & copying
        outs = paged.run(pieces, num_decodes, new)
        for (index, start, stop), out in zip(pieces, outs, strict=True):
            bound = TOLERANCE[dtype]
            wanted = expected[index][start:stop]
            torch.testing.assert_close(out.double(), wanted, atol=bound, rtol=bound)
            done[index] = stop

    def pieces_of(indices: list[int]) -> list[Piece]:
        left = [(index, done[index], lengths[index] - done[index]) for index in indices]
        return [
            (index, start, start + rng.choice([1, rng.randint(1, most)]))
            for index, start, most in left
            if most and rng.random() < 0.8
        ]

    while done[0] < max(1, *shared):
        run([(0, done[0], rng.randint(done[0] + 1, lengths[0]))])
    while done != lengths:
        pieces = pieces_of(rng.sample(range(len(lengths)), len(lengths)))
        if pieces:
            run(pieces)


@pytest.mark.parametrize(("name", "kind"), [*FEW, *MANY])
@given(seed=st.integers(0, 2**32))
def test_any_steps_give_plain_attention(name: str, kind: str, seed: int) -> None:
    """Decodes and chunks mixed, over pages in no order, of which some are shared."""
    check_random_run(name, SHAPES[kind], seed)


@pytest.mark.parametrize("name", with_long(["reference", "cpu"], sorted(CHOICES)))
@pytest.mark.parametrize("kind", ["grouped", "everything"])
@given(seed=st.integers(0, 2**32))
def test_in_bf16_it_is_plain_attention_up_to_rounding(name: str, kind: str, seed: int) -> None:
    """Sums are in fp32."""
    check_random_run(name, SHAPES[kind], seed, torch.bfloat16)


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bidirectional_tokens_see_the_whole_sequence(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    """It may be limited to a window on both sides; sequences are computed as a whole."""
    shape = replace(SHAPES[kind], is_causal=False, chunk=0)
    lengths = [1, 2, 15, 16, 17, 64, 65, 130, 300]
    if name not in QUICK:
        lengths = [1, 16, 65]
    if name == "triton" and dtype == torch.bfloat16:
        dtype = torch.float16  # of bf16 its interpreter has no products
    sequences = Sequences.random(shape, lengths, dtype)
    paged = made(name, sequences, dtype)
    bound = TOLERANCE[dtype]
    outs = paged.run([(index, 0, length) for index, length in enumerate(lengths)])
    for index, out in enumerate(outs):
        wanted = sequences.expected(index)
        torch.testing.assert_close(out.double(), wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize(("name", "kind"), [*FEW, ("triton", "everything")])
def test_the_last_tokens_of_a_bidirectional_sequence_may_be_unseen(name: str, kind: str) -> None:
    """They see the others, or nothing if these are farther away than the window."""
    shape = replace(SHAPES[kind], is_causal=False)
    lengths = [11, 32, 65]
    sequences = replace(Sequences.random(shape, lengths), num_unseen=10)
    paged = made(name, sequences)
    for _ in range(2):  # the second time they are stored
        outs = paged.run([(index, 0, length) for index, length in enumerate(lengths)])
        for index, out in enumerate(outs):
            wanted = sequences.expected(index)
            torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", QUICK)
def test_a_layer_that_does_not_see_ahead_is_causal_in_an_image_too(name: str) -> None:
    """Other layers of the same step see all of the image."""
    shape = replace(GROUPED, sees_ahead=False)
    sequences = replace(Sequences.random(shape, [110, 40]), wholes=((3, 20), (40, 101)))
    paged = made(name, sequences)
    steps: list[list[Piece]] = [[(0, 0, 3), (1, 0, 20)], [(1, 20, 21), (0, 3, 101)]]
    for pieces in steps:
        num_decodes = int(pieces[0][2] - pieces[0][1] == 1)
        for (index, start, stop), out in zip(pieces, paged.run(pieces, num_decodes), strict=True):
            wanted = sequences.expected(index)[start:stop]
            torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [*FEW, *MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_an_image_see_up_to_the_end_in_their_step(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    """Tokens of an image see all of it, beyond any window; a window still limits earlier tokens."""
    wholes = ((3, 20), (40, 101), (101, 104))
    sequences = replace(Sequences.random(SHAPES[kind], [110, 40, 60, 200], dtype), wholes=wholes)
    paged = made(name, sequences, dtype)
    bound = TOLERANCE[dtype]
    steps: list[list[Piece]] = [
        [(0, 0, 3), (1, 0, 20), (3, 0, 101)],
        [(2, 0, 1), (0, 3, 101), (3, 101, 104)],
        [(3, 104, 105), (1, 20, 40), (0, 101, 110)],
        [(3, 105, 200), (2, 1, 3)],
    ]
    for pieces in steps:
        num_decodes = int(pieces[0][2] - pieces[0][1] == 1)
        for (index, start, stop), out in zip(pieces, paged.run(pieces, num_decodes), strict=True):
            wanted = sequences.expected(index)[start:stop]
            torch.testing.assert_close(out.double(), wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("kind", ["grouped", "everything"])
def test_a_position_bias_is_added_to_scores_by_distance(name: str, kind: str) -> None:
    """Each head has its own logits; a softcap and sinks do not change them."""
    lengths = [1, 2, 15, 16, 17, 64, 65, 130, 300]
    shape = biased(replace(SHAPES[kind], is_causal=False, chunk=0), max(lengths))
    sequences = Sequences.random(shape, lengths)
    paged = made(name, sequences)
    outs = paged.run([(index, 0, length) for index, length in enumerate(lengths)])
    for index, out in enumerate(outs):
        torch.testing.assert_close(out.double(), sequences.expected(index), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 20])
def test_a_bidirectional_sequence_is_the_same_alone_and_in_a_batch(window: int) -> None:
    """On a CPU the results are bit-identical."""
    shape = replace(GROUPED, is_causal=False, window=window)
    lengths = [3, 70, 33, 16, 129]
    sequences = Sequences.random(shape, lengths)
    paged = made("cpu", sequences)
    together = paged.run([(index, 0, length) for index, length in enumerate(lengths)])
    for index, length in enumerate(lengths):
        (alone,) = paged.run([(index, 0, length)])
        assert torch.equal(alone, together[index])


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_keys_and_values_of_eight_bits_are_those_that_are_nearest(name: str) -> None:
    """Numbers beyond the largest become the largest; queries and sums are unchanged."""
    lengths = [1, 18, 70]
    sequences = Sequences.random(SHAPES["sinks"], lengths)
    sequences.values[1][:, 3] *= 1000
    exact = replace(
        sequences,
        keys=[key.to(FP8).float() for key in sequences.keys],
        values=[value.clamp(-448, 448).to(FP8).float() for value in sequences.values],
    )
    make, page_size = BACKENDS[name]
    backend = make([sequences.shape], num_pages(sequences, page_size), FP8, CPU)
    paged = Paged(backend, sequences, scattered(sequences, page_size))
    for pieces in ([(0, 0, 1), (1, 0, 18), (2, 0, 65)], [(2, 65, 66)], [(2, 66, 70)]):
        decodes = int(pieces[0][2] - pieces[0][1] == 1)
        for (index, start, stop), out in zip(pieces, paged.run(pieces, decodes), strict=True):
            wanted = exact.expected(index)[start:stop]
            torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    assert make.page_bytes([sequences.shape], FP8) * 4 == make.page_bytes(
        [sequences.shape], torch.float32
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_slots_of_a_step_are_written(name: str) -> None:
    """Only the numbers of the step's tokens are stored; every other slot is unchanged."""
    sequences = Sequences.random(SHAPES["narrow values"], [1, 30, 17])
    paged = made(name, sequences)
    paged.run([(0, 0, 1), (1, 0, 30), (2, 0, 9)])
    backend = paged.backend
    assert isinstance(backend, ReferenceAttention | RowsAttention | CpuAttention | TritonAttention)
    held = 40 * sequences.shape.num_kv_heads
    assert int((~backend.keys[0].isnan()).sum()) == held * sequences.shape.key_dim
    assert int((~backend.values[0].isnan()).sum()) == held * sequences.shape.value_dim


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_have_separate_pages(name: str) -> None:
    """The data of one layer is not visible to another of the same shape."""
    sequences = Sequences.random(GROUPED, [9])
    make, page_size = BACKENDS[name]
    backend: AttentionBackend = make([GROUPED] * 2, 5, torch.float32, CPU)
    paged = Paged(backend, sequences, scattered(sequences, page_size))
    backend.prepare(paged.step([(0, 0, 9)], 0))
    keys, values = sequences.keys[0].transpose(0, 1), sequences.values[0].transpose(0, 1)
    for layer, factor in enumerate((1.0, -1.0)):
        backend.store(layer, keys, values * factor)
    first, second = (backend.attend(layer, sequences.queries[0]) for layer in range(2))
    torch.testing.assert_close(first.double(), sequences.expected(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second, -first, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("turned_numbers", [16, 12])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUICK)
def test_heads_enter_normed_and_turned(
    name: str, dtype: torch.dtype, *, is_normed: bool, turned_numbers: int
) -> None:
    """They match the fp32 reference: queries and keys by their own weights, values unchanged."""
    make, page_size = BACKENDS[name]
    shape, length = AttentionShape(6, 2, 16, 16, 0.25), 40
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(length, 10 * 16, generator=generator).to(dtype)
    angles = torch.randn(length, turned_numbers // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = torch.randn(2, 16, generator=generator)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if is_normed else None
    query, key, value = reference_blocks.qk_norm_rope(qkv.float(), cos_sin, shape, norms)
    exact = Sequences(shape, [query], [key.transpose(0, 1)], [value.transpose(0, 1)], None, [0])
    backend: AttentionBackend = make([shape], num_pages(exact, page_size), dtype, CPU)
    paged = Paged(backend, exact, scattered(exact, page_size))
    bound = TOLERANCE[dtype]
    for start, stop in ((0, 17), (17, 18), (18, length)):  # on in the middle of pages
        backend.prepare(paged.step([(0, start, stop)], 0))
        entered = backend.store_qkv(0, qkv[start:stop], cos_sin[start:stop], norms)
        assert entered.dtype == dtype
        torch.testing.assert_close(entered.float(), query[start:stop], atol=bound, rtol=bound)
        out = backend.attend(0, entered)
        wanted = exact.expected(0)[start:stop]
        torch.testing.assert_close(out.double(), wanted, atol=2 * bound, rtol=bound)


def test_a_cpu_has_its_own_kernels_where_they_fit_all_layers() -> None:
    """Keys that are not whole words, and other dtypes, are left to the reference."""
    odd = replace(GROUPED, key_dim=9)
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_backend([GROUPED] * 2, dtype, CPU) is CpuAttention
    assert choose_backend([GROUPED, odd], torch.bfloat16, CPU) is ReferenceAttention
    assert choose_backend([GROUPED], torch.float16, CPU) is ReferenceAttention
    assert choose_backend([GROUPED], FP8, CPU) is ReferenceAttention


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "expected"),
    [
        (GROUPED, torch.bfloat16, (8, 0), TritonAttention),
        (GROUPED, FP8, (8, 0), TritonAttention),
        (GROUPED, torch.float64, (8, 0), ReferenceAttention),
        (replace(GROUPED, key_dim=513), torch.bfloat16, (8, 0), ReferenceAttention),
        (replace(GROUPED, num_query_heads=130), torch.bfloat16, (8, 0), ReferenceAttention),
        (GROUPED, torch.bfloat16, (7, 5), ReferenceAttention),
    ],
    ids=["served", "eight bits", "a dtype", "a width", "a group", "an old card"],
)
def test_a_gpu_has_its_own_kernels_where_they_fit_all_layers(
    shape: AttentionShape,
    dtype: torch.dtype,
    capability: tuple[int, int],
    expected: AttentionBackendType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads too wide or too many, other dtypes, and old cards are left to the reference."""
    monkeypatch.setattr(backends, "_capability", lambda _: capability)
    assert choose_backend([GROUPED, shape], dtype, torch.device("cuda")) is expected


@pytest.mark.parametrize(
    ("device", "key_dim", "capability", "expected"),
    [
        ("cuda", 576, (8, 0), TritonLatentAttention),
        ("cuda", 640, (8, 0), LatentAttention),
        ("cuda", 576, (7, 5), LatentAttention),
        ("cpu", 576, (8, 0), LatentAttention),
    ],
)
def test_latents_have_a_gpus_kernels_where_they_fit(
    device: str,
    key_dim: int,
    capability: tuple[int, int],
    expected: AttentionBackendType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary parts too wide, old cards and CPUs are left to torch; so is a reference."""
    monkeypatch.setattr(backends, "_capability", lambda _: capability)
    shape = AttentionShape(16, 1, key_dim, 512, 1.0, has_latent_values=True)
    assert choose_backend([shape], torch.bfloat16, torch.device(device)) is expected
    with reference_kernels():
        assert choose_backend([shape], torch.bfloat16, torch.device(device)) is LatentAttention
    sparse = replace(shape, num_selected=2048, index_dim=128)
    backend = choose_backend([sparse], torch.bfloat16, torch.device(device))
    assert getattr(backend, "latents_type", None) is expected


@pytest.mark.parametrize(
    ("device", "dtype", "module"),
    [
        ("cpu", torch.float32, cpu_blocks),
        ("cpu", torch.bfloat16, cpu_blocks),
        ("cpu", torch.float16, reference_blocks),
        ("cuda", torch.bfloat16, triton_blocks),
        ("cuda", torch.float16, triton_blocks),
        ("cuda", torch.float64, reference_blocks),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else str(value),
)
def test_operations_between_products_are_the_devices_own_if_it_has_any(
    device: str, dtype: torch.dtype, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's kernels take two types of numbers, a GPU's three; all else is the reference's."""
    monkeypatch.setattr(backends, "_capability", lambda _: (8, 0))
    chosen: Any = choose_elementwise(dtype, torch.device(device))
    assert chosen is module


@pytest.mark.parametrize(
    ("device", "dtype", "module"),
    [
        ("cpu", torch.bfloat16, reference_experts),
        ("cuda", torch.float16, triton_experts),
        ("cuda", torch.float64, reference_experts),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else str(value),
)
def test_experts_are_mixed_by_the_devices_own_functions_where_it_has_any(
    device: str, dtype: torch.dtype, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has them for three types of numbers."""
    monkeypatch.setattr(backends, "_capability", lambda _: (8, 0))
    chosen: Any = choose_experts(dtype, torch.device(device))
    assert chosen is module


def test_torch_computes_on_its_callers_thread_next_to_our_thread_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU needs this; a GPU's host has nothing else to do."""
    thread_counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", thread_counts.append)
    limit_torch_threads(torch.device("cuda"))
    assert thread_counts == []
    limit_torch_threads(CPU)
    assert thread_counts == [1]
