"""Tests of `tidemill erase`: it requires a confirmation."""

from __future__ import annotations

from tests.cli.api_rig import Shell, submitted


def test_a_batch_is_erased(shell: Shell) -> None:
    """A flag confirms the erasure, and the message contains its state."""
    batch_id = submitted(shell)
    result = shell.type("erase", batch_id)
    assert result.status == 2
    assert "--yes" in result.err
    assert shell.api.count("DELETE", batch_id) == 0
    assert "is being erased" in shell.type("erase", batch_id, "--yes").err
    result = shell.type("erase", batch_id, "--yes", "--json")
    assert result.status == 0
    assert "is erased" in result.err
    assert result.values[-1]["tidemill"]["erased_at"] == 1
    assert shell.type("erase", "batch_0", "--yes").status == 1
