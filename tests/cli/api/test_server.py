"""Where the API is and whose key is taken: flags and variables."""

from __future__ import annotations

import pytest

from tests.cli.api_rig import Shell

COMMANDS = ["resume", "status", "results", "cancel"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_address_that_is_missing_is_named(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """OpenAI's own is not read in its place: that would send a file to somebody else."""
    monkeypatch.delenv("TIDEMILL_BASE_URL")
    monkeypatch.setenv("OPENAI_BASE_URL", shell.api.url)
    said = shell.type(command, "batch_1")
    assert (said.status, said.out) == (2, "")
    assert "set TIDEMILL_BASE_URL" in said.err
    assert shell.api.requests == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_is_missing_is_named_by_a_server_that_wants_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Others take none; OpenAI's own is not sent in its place."""
    monkeypatch.delenv("TIDEMILL_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    said = shell.type(command, "batch_1")
    assert (said.status, said.out) == (8, "")
    assert "set TIDEMILL_API_KEY" in said.err
    assert "sk-x" not in said.err


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_written_as_people_do(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """With and without the version and a slash."""
    monkeypatch.setenv("TIDEMILL_BASE_URL", "http://127.0.0.1:9")
    assert shell.type("status", "--base-url", f"{shell.api.url}{suffix}").status == 0
    assert shell.api.requests == [("GET", "/v1/batches")]
