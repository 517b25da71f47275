"""`tidemill cancel`: what was asked for is a success."""

from __future__ import annotations

from tests.cli.api_rig import Shell, submitted


def test_a_batch_is_cancelled(shell: Shell) -> None:
    """At once, or when it has ended; as that was asked for, it is a success."""
    said = shell.type("cancel", submitted(shell))
    assert said.status == 0
    assert "is cancelling" in said.err
    said = shell.type("cancel", submitted(shell), "--wait", "--json")
    assert said.status == 0
    assert said.values[-1]["status"] == "cancelled"
