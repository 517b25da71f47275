"""The CPU's compiled kernels, against the references that they stand in for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import cpu, reference
from engine.kernels.attention import AttentionShape
from engine.kernels.cpu import PAGE_SIZE
from engine.kernels.packed import PackedStep
from tests.engine.kernels.paged import Paged, Sequences

GROUPED = AttentionShape(6, 2, 8, 16, 0.4)
KINDS = {
    "full": GROUPED,
    "window within a page": replace(GROUPED, window=5),
    "window over pages": replace(GROUPED, window=37),
    "window of one": replace(GROUPED, window=1),
    "softcap": replace(GROUPED, softcap=2.0),
    "sinks": replace(GROUPED, has_sinks=True),
    "everything": replace(GROUPED, window=20, softcap=5.0, has_sinks=True),
}
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 70]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def decoded(sequences: Sequences, paged: Paged) -> torch.Tensor:
    """Run the kernel on the last token of each sequence."""
    return cpu.decode(
        torch.stack([query[-1] for query in sequences.queries]),
        paged.keys,
        paged.values,
        paged.decode_step(sequences.lengths),
        sequences.shape,
        sequences.sinks,
    )


def check(sequences: Sequences, paged: Paged, tolerance: float | None = None) -> None:
    """Hold the kernel to plain attention."""
    out = decoded(sequences, paged)
    dtype = sequences.keys[0].dtype
    tolerance = tolerance or TOLERANCE[dtype]
    assert out.dtype == dtype
    for index, row in enumerate(out):
        expected = sequences.expected(index)[-1]
        torch.testing.assert_close(row.double(), expected, atol=tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_decoding_is_plain_attention(kind: str, dtype: torch.dtype) -> None:
    """Lengths around the edges of pages and windows, pages in no order, unwritten slots NaN."""
    sequences = Sequences.random(KINDS[kind], LENGTHS, dtype)
    paged = Paged.of(sequences, PAGE_SIZE)
    paged.write(sequences)
    check(sequences, paged)


@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(2, 2, 24, 8, 0.2),
        AttentionShape(1, 1, 8, 1, 0.2),
        AttentionShape(8, 1, 64, 64, 0.125),
        AttentionShape(9, 3, 128, 20, 0.1, window=19),
    ],
    ids=str,
)
def test_heads_may_be_of_any_number_and_width(shape: AttentionShape, dtype: torch.dtype) -> None:
    """No groups or one for all, and values narrower than keys."""
    sequences = Sequences.random(shape, LENGTHS, dtype)
    paged = Paged.of(sequences, PAGE_SIZE)
    paged.write(sequences)
    check(sequences, paged)


def test_decoding_equals_the_reference_kernel() -> None:
    """The same call on the same step gives the same rows."""
    sequences = Sequences.random(KINDS["everything"], LENGTHS)
    paged = Paged.of(sequences, PAGE_SIZE)
    paged.write(sequences)
    expected = reference.decode(
        torch.stack([query[-1] for query in sequences.queries]),
        paged.keys,
        paged.values,
        paged.decode_step(LENGTHS),
        sequences.shape,
        sequences.sinks,
    )
    torch.testing.assert_close(decoded(sequences, paged), expected, atol=2e-6, rtol=4e-6)


@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_a_row_is_summed_alike_whatever_runs_beside_it(dtype: torch.dtype) -> None:
    """Bit for bit: alone, among others, and on other pages."""
    sequences = Sequences.random(KINDS["everything"], LENGTHS, dtype)
    paged = Paged.of(sequences, PAGE_SIZE)
    paged.write(sequences)
    together = decoded(sequences, paged)
    for index in range(len(LENGTHS)):
        alone = Sequences(
            sequences.shape,
            [sequences.queries[index]],
            [sequences.keys[index]],
            [sequences.values[index]],
            sequences.sinks,
        )
        elsewhere = Paged.of(alone, PAGE_SIZE)
        elsewhere.write(alone)
        assert torch.equal(decoded(alone, elsewhere)[0], together[index])


@pytest.mark.parametrize("size", [1e-3, 40.0])
def test_scores_of_any_size_neither_overflow_nor_vanish(size: float) -> None:
    """Also when a sink or one token outweighs all others by e to the hundreds."""
    sequences = Sequences.random(replace(GROUPED, has_sinks=True), LENGTHS)
    for query in sequences.queries:
        query.mul_(size)
    paged = Paged.of(sequences, PAGE_SIZE)
    paged.write(sequences)
    check(sequences, paged, tolerance=1e-4)  # a score of 300 is known to 3e-5


@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_in_a_sequence_shows_in_its_row_alone(
    dtype: torch.dtype, part: str, bad: float
) -> None:
    """Else a broken row would pass for a good one: fast maths must not lose a NaN."""
    sequences = Sequences.random(GROUPED, LENGTHS, dtype)
    broken = LENGTHS.index(33)
    tensors = sequences.keys if part == "key" else sequences.values
    tensors[broken][0, 20] = bad
    paged = Paged.of(sequences, PAGE_SIZE)
    paged.write(sequences)
    finite = decoded(sequences, paged).isfinite().all(dim=-1)
    assert not finite[broken, :3].any()
    assert finite[broken, 3:].all()
    finite[broken] = True
    assert finite.all()


@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_tokens_are_stored_where_the_reference_stores_them(dtype: torch.dtype) -> None:
    """Keys as the model hands them, transposed, and values; every other slot stays as it was."""
    generator = torch.Generator().manual_seed(4)
    slots = torch.randperm(6 * PAGE_SIZE, generator=generator)[:40]
    step = PackedStep(
        num_decodes=0,
        token_pages=slots // PAGE_SIZE,
        token_offsets=slots % PAGE_SIZE,
        decode_pages=torch.zeros(0, 0, dtype=torch.int32),
        decode_lengths=torch.zeros(0, dtype=torch.int32),
        chunks=(),
    )
    key = torch.randn(2, 40, 8, generator=generator).to(dtype).transpose(0, 1)
    value = torch.randn(40, 2, 12, generator=generator).to(dtype)
    caches = [
        (
            torch.full((6, 2, 8, PAGE_SIZE), 7, dtype=dtype),
            torch.full((6, 2, PAGE_SIZE, 12), 7, dtype=dtype),
        )
        for _ in range(2)
    ]
    cpu.store(*caches[0], key, value, step)
    reference.store(*caches[1], key, value, step)
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])


def test_what_the_kernel_does_not_fit_is_left_to_the_reference() -> None:
    """Odd widths of keys, dtypes that numba cannot widen, and pages of another size."""
    assert cpu.supports_attention(torch.float32, GROUPED, PAGE_SIZE)
    assert cpu.supports_attention(torch.bfloat16, GROUPED, PAGE_SIZE)
    assert not cpu.supports_attention(torch.float32, replace(GROUPED, key_dim=10), PAGE_SIZE)
    assert not cpu.supports_attention(torch.float16, GROUPED, PAGE_SIZE)
    assert not cpu.supports_attention(torch.float32, GROUPED, 2 * PAGE_SIZE)


ROWS = [1, 3, 700]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_rms_norm_is_that_of_torch(dtype: torch.dtype, rows: int) -> None:
    """Of rows of any size of values, in the dtype of the input."""
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(1, rows, 96, generator=generator) * 10.0 ** (rows % 4 - 2)).to(dtype)
    weight = torch.randn(96, generator=generator)
    out = cpu.rms_norm(x, weight, 1e-5)
    expected = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    assert out.dtype == dtype
    assert out.shape == x.shape
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=tolerance)


def test_rms_norm_takes_the_heads_of_a_wider_row() -> None:
    """A slice of merged projections is not contiguous."""
    x = torch.randn(1, 5, 12, 16, generator=torch.Generator().manual_seed(0))[:, :, 4:8]
    weight = torch.ones(16)
    out = cpu.rms_norm(x, weight, 1e-6)
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_rms_norm_of_zeros_is_zeros() -> None:
    """The epsilon keeps the scale finite."""
    assert not cpu.rms_norm(torch.zeros(2, 96), torch.ones(96), 1e-6).any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_the_gate_is_that_of_torch(dtype: torch.dtype, rows: int) -> None:
    """From where the sigmoid is 0 to where it is 1, rounded once."""
    generator = torch.Generator().manual_seed(rows)
    gate = (torch.randn(1, rows, 96, generator=generator) * 12).to(dtype)
    up = torch.randn(1, rows, 96, generator=generator).to(dtype)
    out = cpu.silu_mul(torch.cat([gate, up], dim=-1))
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    assert out.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_the_gate_is_closed_and_open_at_its_ends(dtype: torch.dtype) -> None:
    """Nothing overflows far out, and what is not finite stays so."""
    gate = torch.tensor([[-1e30, -300.0, 0.0, 300.0, 1e30, torch.nan]], dtype=dtype)
    out = cpu.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))[0]
    assert out[:3].abs().max() < 1e-6
    torch.testing.assert_close(out[3:5], gate[0, 3:5], rtol=2e-7, atol=0)
    assert out[5].isnan()


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """To the nearest, ties to even, up into the next exponent and beyond the largest."""
    weight = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-8, 1 + 2**-8 + 2**-20, -3.3896e38])
    normed = cpu.rms_norm(torch.ones(1, 5, dtype=torch.bfloat16), weight, 0.0)
    assert torch.equal(normed[0], weight.bfloat16())
    both = torch.cat([torch.full_like(normed, 64.0), normed], dim=-1)
    assert not cpu.silu_mul(both)[0, 4].isfinite()


def test_no_kernel_may_take_it_that_there_is_no_nan() -> None:
    """What is not finite must come out: a compiler that may assume otherwise need not keep it."""
    kernels = [kernel for kernel in vars(cpu).values() if hasattr(kernel, "targetoptions")]
    assert len(kernels) >= 5
    for kernel in kernels:
        assert isinstance(kernel.targetoptions["fastmath"], set)
        assert not kernel.targetoptions["fastmath"] & {"fast", "nnan", "ninf"}


@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_goes_through_norm_and_gate(dtype: torch.dtype, value: float) -> None:
    """In its own row, and in no other."""
    x = torch.ones(3, 64, dtype=dtype)
    x[1, 5] = value
    for out in (cpu.rms_norm(x, torch.ones(64), 1e-6), cpu.silu_mul(x)):
        assert not out[1].isfinite().all()
        assert out[[0, 2]].isfinite().all()
