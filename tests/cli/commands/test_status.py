"""`tidemill status`: one batch in detail, or a table."""

from __future__ import annotations

import os

import pytest

from tests.cli.api_rig import Shell, line, submitted


def test_one_batch_is_shown_in_detail(shell: Shell) -> None:
    """With what its file was refused for, and nothing that would move a terminal's cursor."""
    batch_id = submitted(shell)
    shell.api.batches[batch_id] |= {
        "errors": {"data": [{"code": "x", "message": "no \x1b[2Jgood", "line": 7}]},
        "metadata": {"team": "sea\nrch"},
    }
    said = shell.type("status", batch_id)
    assert said.status == 0
    assert f"id{' ' * 8}" in said.out
    assert "error: line 7: no �[2Jgood" in said.out
    assert "sea�rch" in said.out


def test_the_newest_batches_are_a_table(shell: Shell) -> None:
    """As many as were asked for, over as many pages as that takes."""
    for number in range(3):
        submitted(shell, str(number))
    assert len(shell.type("status").out.splitlines()) == 4
    said = shell.type("status", "--limit", "2", "--json")
    ids = list(shell.api.batches)
    assert [value["id"] for value in said.values] == [ids[2], ids[1]]


def test_all_batches_are_listed_over_pages(shell: Shell) -> None:
    """Each once."""
    file = shell.file(line("a"))
    shell.type("submit", file)
    [batch] = shell.api.batches.values()
    for number in range(249):
        shell.api.batches[f"batch_{number}"] = batch | {"id": f"batch_{number}"}
    said = shell.type("status", "--all", "--json")
    assert len({value["id"] for value in said.values}) == 250
    assert shell.api.count("GET", "/v1/batches$") == 3


def test_no_batch_is_a_sentence(shell: Shell) -> None:
    """And nothing on standard output."""
    said = shell.type("status")
    assert (said.status, said.out) == (0, "")
    assert "there are no batches" in said.err


def test_watching_one_batch_ends_with_its_outcome(shell: Shell) -> None:
    """As waiting for it does, without fetching anything."""
    batch_id = submitted(shell, end="expired")
    said = shell.type("status", batch_id, "--watch", "--json")
    assert said.status == 5
    assert [value["status"] for value in said.values] == ["in_progress", "expired"]


def test_a_watched_table_is_for_people(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on until a signal comes; programs watch one batch."""
    assert shell.type("status", "--watch", "--json").status == 2
    submitted(shell)

    def stop(_: float) -> None:
        os.kill(os.getpid(), 2)

    monkeypatch.setattr("cli.api.patience.pause", stop)
    assert shell.type("status", "--watch").status == 130
