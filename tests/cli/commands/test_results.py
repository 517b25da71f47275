"""`tidemill results`: rows in files, printed, or as they come."""

from __future__ import annotations

from tests.cli.api_rig import Shell, line, submitted
from tests.cli.fake_api import row_of


def test_results_of_a_batch_that_runs_are_not_there_yet(shell: Shell) -> None:
    """It says how to wait, and how to see rows before the end."""
    said = shell.type("results", submitted(shell))
    assert said.status == 1
    assert "`tidemill resume" in said.err
    assert "--follow" in said.err


def test_results_can_be_printed(shell: Shell) -> None:
    """The good rows alone; the others are told of."""
    batch_id = submitted(shell, "a", "b", fail=True)
    shell.type("resume", batch_id)
    said = shell.type("results", batch_id, "-o", "-")
    assert said.status == 3
    assert said.out.encode() == row_of(line("a"))
    assert "1 row failed: -e FILE fetches them" in said.err


def test_rows_are_printed_as_they_come(shell: Shell) -> None:
    """Each once, also those that were finished behind a gap."""
    batch_id = submitted(shell, *"abcdefg")
    said = shell.type("results", batch_id, "--follow")
    assert said.status == 0
    assert [value["line"] for value in said.values] == [1, 3, 5, 7, 2, 4, 6]
    assert {value["custom_id"] for value in said.values} == set("abcdefg")


def test_why_rows_failed_is_told_once_for_each_kind(shell: Shell) -> None:
    """In files with the name of theirs, and below rows that are printed as they come."""
    batch_id = submitted(shell, "a", "b", fail="`n` must be 1")
    shell.type("resume", batch_id)
    said = shell.type("results", batch_id, "-o", "out", "-e", "errors", "--force")
    assert said.status == 3
    assert "1 row failed, in errors:\n  1 × `n` must be 1\n" in said.err
    said = shell.type("results", batch_id, "--follow")
    assert "1 row failed:\n  1 × `n` must be 1 (line 2)\n" in said.err
