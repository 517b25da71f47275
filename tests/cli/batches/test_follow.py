"""How a batch is looked at while it runs."""

from __future__ import annotations

from cli.batches.follow import poll_delays


def test_looks_become_rarer() -> None:
    """From one second to ten, and never more."""
    delays = poll_delays()
    found = [next(delays) for _ in range(20)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert found[-1] == 10.0
