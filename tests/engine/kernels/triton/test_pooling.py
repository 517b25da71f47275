"""The GPU's pooling, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.engine.kernels.triton.mutating import Mutation, assert_found, each_of
from tidemill.engine.kernels import pooling as reference
from tidemill.engine.kernels.pooling import Segments
from tidemill.engine.kernels.triton import pooling

# One token, a tile, one more.
LENGTHS = torch.tensor([1, 16, 17])
SEGMENTS = Segments(
    torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)]), torch.tensor([0, 3, 1])
)


def check_pooling(
    module: ModuleType, dtype: torch.dtype = torch.float32, widths: tuple[int, ...] = (65,)
) -> None:
    """Compare each mode, and all of them side by side, with the reference."""
    for width in widths:
        hidden = torch.randn(int(LENGTHS.sum()), width).to(dtype)
        exact = [reference.pool(hidden.float(), SEGMENTS, (mode,)) for mode in pooling.MODES]
        got = module.pool(hidden, SEGMENTS, pooling.MODES)
        torch.testing.assert_close(got, torch.cat(exact, dim=1), atol=1e-5, rtol=1e-5)


def check_units(module: ModuleType) -> None:
    """Check that vectors have length 1, and that zeros stay zeros."""
    for width in (1, 16, 17):
        x = torch.randn(3, width)
        x[1] = 0
        torch.testing.assert_close(module.normalise(x), reference.normalise(x.double()).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_mode_is_the_references(dtype: torch.dtype) -> None:
    """Sums are in fp32, whatever the dtype of hidden states."""
    check_pooling(pooling, dtype, (1, 64, 65))


def test_vectors_come_to_length_one() -> None:
    """A vector of zeros stays zero."""
    check_units(pooling)


def test_a_vector_is_its_own_sequences() -> None:
    """It is bit-identical when it runs alone; a NaN does not affect other sequences."""
    hidden = torch.randn(int(LENGTHS.sum()), 20)
    hidden[9] = torch.nan
    together = pooling.pool(hidden, SEGMENTS, pooling.MODES).view(len(LENGTHS), -1, 20)
    modes = torch.tensor([mode not in {"cls", "lasttoken"} for mode in pooling.MODES])
    assert together[1][modes].isnan().all()
    assert not together[[0, 2]].isnan().any()
    own = hidden[int(SEGMENTS.starts[2]) :]
    alone = Segments(torch.tensor([0, len(own)]), SEGMENTS.skipped[2:])
    assert torch.equal(pooling.pool(own, alone, pooling.MODES).view(-1, 20), together[2])


MISTAKES = {
    check_pooling: [
        Mutation("is_column = columns < width", "is_column = columns < width - 1"),
        Mutation("(rows < stop)", "(rows < stop - 1)"),
        Mutation("tl.program_id(1) * COLUMNS", "tl.program_id(1) * (COLUMNS + 1)"),
        Mutation("stop = start + 1", "stop = start + 2"),
        Mutation("start = stop - 1", "start = stop - 2"),
        Mutation("before + 1 + rows", "before + rows"),
        Mutation("count * (count + 1) // 2", "count * (count + 2) // 2"),
    ],
    check_units: [
        Mutation("is_there = columns < width", "is_there = columns < width - 1"),
        Mutation("tl.maximum(length, SHORTEST)", "(length + 1)"),
    ],
}


@pytest.mark.long  # holds the tests above to what they can find
@pytest.mark.parametrize(("check", "mistake"), each_of(MISTAKES))
def test_a_mistake_is_found(
    check: Callable[[ModuleType], None], mistake: Mutation, tmp_path: Path
) -> None:
    """A bound that is off by one, or a weight."""
    assert_found(check, pooling, mistake, tmp_path)
