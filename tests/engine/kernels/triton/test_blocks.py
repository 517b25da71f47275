"""The GPU's norms and gates, each against its reference in float64."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.kernels import blocks as reference
from engine.kernels.triton import blocks
from tests.engine.kernels.triton.mutating import Mutation, assert_found

WIDTHS = [1, 15, 16, 17, 96]


def check_rms_norm(module: ModuleType) -> None:
    """Hold the norm to torch's, for rows that end within a block and at its end."""
    for width in WIDTHS:
        x, weight = torch.randn(3, width), torch.randn(width)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(module.rms_norm(x, weight, 1e-5), expected.float())


def test_a_norm_is_torchs() -> None:
    """Whatever the width."""
    check_rms_norm(blocks)


MISTAKES = [
    Mutation("columns < width", "columns < width - 1"),
    Mutation("/ width + eps", "/ BLOCK + eps"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_found(mistake: Mutation, tmp_path: Path) -> None:
    """A bound that is off by one, or a mean over a block."""
    assert_found(check_rms_norm, blocks, mistake, tmp_path)
