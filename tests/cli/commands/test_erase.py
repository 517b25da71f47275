"""`tidemill erase`: what cannot be undone is said twice."""

from __future__ import annotations

from tests.cli.api_rig import Shell, submitted


def test_a_batch_is_erased(shell: Shell) -> None:
    """It is asked for with a flag of its own, and said whether it is done yet."""
    batch_id = submitted(shell)
    said = shell.type("erase", batch_id)
    assert said.status == 2
    assert "--yes" in said.err
    assert shell.api.count("DELETE", batch_id) == 0
    assert "is being erased" in shell.type("erase", batch_id, "--yes").err
    said = shell.type("erase", batch_id, "--yes", "--json")
    assert said.status == 0
    assert "is erased" in said.err
    assert said.values[-1]["tidemill"]["erased_at"] == 1
    assert shell.type("erase", "batch_0", "--yes").status == 1
