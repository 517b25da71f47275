"""What all tests of the GPU's kernels have: numbers that are others in every run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_numbers() -> Iterator[None]:
    """Draw others in every run, which KERNEL_SEED repeats; what nobody wrote is no number."""
    seed = int(os.environ.get("KERNEL_SEED") or torch.seed() % 2**32)
    sys.stderr.write(f"KERNEL_SEED={seed}\n")
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
