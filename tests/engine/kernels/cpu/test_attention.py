"""The CPU's decode kernel beyond plain attention: bit-identical results, and all sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.paged import CPU, Paged, Sequences, num_pages, scattered
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.cpu.attention import PAGE_SIZE, CpuAttention
from tidemill.engine.kernels.cpu.scalars import DTYPES

GROUPED = AttentionShape(6, 2, 8, 16, 0.4)
EVERYTHING = replace(GROUPED, window=20, softcap=5.0, has_sinks=True)
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 70]


def decoded(sequences: Sequences, seed: int = 1) -> Tensor:
    """Run the kernel on the last token of each sequence, their pages scattered by a seed."""
    dtype = sequences.keys[0].dtype
    backend = CpuAttention([sequences.shape], num_pages(sequences, PAGE_SIZE), dtype, CPU)
    return Paged(backend, sequences, scattered(sequences, PAGE_SIZE, seed)).decode_all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decode_is_as_exact_as_its_dtype(dtype: torch.dtype) -> None:
    """Everything is summed in fp32, and rounded once."""
    sequences = Sequences.random(EVERYTHING, LENGTHS, dtype)
    expected = torch.stack([sequences.expected(index)[-1] for index in range(len(LENGTHS))])
    bound = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(decoded(sequences).double(), expected, atol=bound, rtol=2 * bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_sum_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """Bit for bit: alone, among others, and on other pages."""
    sequences = Sequences.random(EVERYTHING, LENGTHS, dtype)
    together = decoded(sequences)
    for index in range(len(LENGTHS)):
        alone = Sequences(
            sequences.shape,
            [sequences.queries[index]],
            [sequences.keys[index]],
            [sequences.values[index]],
            sequences.sinks,
            [0],
        )
        assert torch.equal(decoded(alone, seed=2)[0], together[index])


@pytest.mark.parametrize("size", [1e-3, 40.0])
def test_scores_of_any_size_neither_overflow_nor_vanish(size: float) -> None:
    """One case has a sink or token that outweighs all others by e to the hundreds."""
    sequences = Sequences.random(replace(GROUPED, has_sinks=True), LENGTHS)
    for query in sequences.queries:
        query.mul_(size)
    expected = torch.stack([sequences.expected(index)[-1] for index in range(len(LENGTHS))])
    out = decoded(sequences)  # a score of 300 is known to 3e-5
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_numbers_of_a_sequence_show_only_in_its_row(
    dtype: torch.dtype, part: str, bad: float
) -> None:
    """Otherwise a broken row would pass for a good one: fast maths must not lose a NaN."""
    sequences = Sequences.random(GROUPED, LENGTHS, dtype)
    broken = LENGTHS.index(33)
    tensors = sequences.keys if part == "key" else sequences.values
    tensors[broken][0, 20] = bad
    finite = decoded(sequences).isfinite().all(dim=-1)
    assert not finite[broken, :3].any()
    assert finite[broken, 3:].all()
    finite[broken] = True
    assert finite.all()
