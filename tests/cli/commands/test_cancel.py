"""Tests of `tidemill cancel`: a cancelled batch is a success."""

from __future__ import annotations

from tests.cli.api_rig import Shell, submitted


def test_a_batch_is_cancelled(shell: Shell) -> None:
    """With and without --wait, a cancelled batch is a success."""
    result = shell.type("cancel", submitted(shell))
    assert result.status == 0
    assert "is cancelling" in result.err
    result = shell.type("cancel", submitted(shell), "--wait", "--json")
    assert result.status == 0
    assert result.values[-1]["status"] == "cancelled"
