"""What products cost, as a table."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import product_cost
from tidemill.engine.kernels.cpu import linear


@pytest.mark.skipif(not linear.supports(torch.float32), reason="no kernel for fp32 on this CPU")
def test_a_shape_is_told_for_each_number_of_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what each way did in its time, which is the work of the shape."""
    monkeypatch.setattr(product_cost, "COLD_BYTES", 20_000)
    monkeypatch.setattr(product_cost, "REST_SECONDS", 0)
    costs = product_cost.measure(64, 32, [1, 3], torch.float32)
    assert [(cost.rows, cost.num_bytes) for cost in costs] == [(1, 8192), (3, 8192)]
    known = product_cost.ProductCost(64, 32, 1000, 8192, own=1e-3, onednn=2e-3, by_sum=1e-6)
    product_cost.show([known])
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "| 64 × 32 | 1000 | 1000 | 2000 | 4 | 2 | 0.0 | 0.0 | 8.2 |"
