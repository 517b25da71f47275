"""The speed of linear layers is measured for every library that has a kernel."""

from __future__ import annotations

import torch

from bench.kernels.linear_cost import rates


def test_every_library_has_a_rate() -> None:
    """Torch multiplies everything."""
    found = rates(32, 16, 3, torch.float32, runs=1)
    assert list(found) == ["ours", "oneDNN", "torch"]
    assert found["torch"] > 0
