"""Fixtures of all tests of GPU kernels: random numbers that differ in every run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_numbers() -> Iterator[None]:
    """Draw new numbers in every run, which KERNEL_SEED repeats; unwritten memory is NaN."""
    seed = int(os.environ.get("KERNEL_SEED") or torch.seed() % 2**32)
    sys.stderr.write(f"KERNEL_SEED={seed}\n")
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
