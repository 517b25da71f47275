"""The cost of endpoints: each is answered, and each vendor's line is read."""

from __future__ import annotations

from bench.kernels.endpoint_cost import BODIES, LINES, measure


def test_each_endpoint_and_vendor_has_a_figure() -> None:
    """A failed reply, or a line that is not a request, would fail the measurement."""
    assert measure(requests=2, rounds=1).keys() == {*BODIES, *LINES}
