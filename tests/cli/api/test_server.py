"""Tests of the API's base URL and key, from flags and variables."""

from __future__ import annotations

import pytest

from tests.cli.api_rig import Shell

COMMANDS = ["resume", "status", "results", "cancel"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_address_that_is_missing_is_named(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """OpenAI's variable is not used instead: that would send a file to another server."""
    monkeypatch.delenv("TIDEMILL_BASE_URL")
    monkeypatch.setenv("OPENAI_BASE_URL", shell.api.url)
    result = shell.type(command, "batch_1")
    assert (result.status, result.out) == (2, "")
    assert "set TIDEMILL_BASE_URL" in result.err
    assert shell.api.requests == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_is_missing_is_named_by_a_server_that_wants_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """OpenAI's key is not sent to a server that requires another one."""
    monkeypatch.delenv("TIDEMILL_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    result = shell.type(command, "batch_1")
    assert (result.status, result.out) == (8, "")
    assert "set TIDEMILL_API_KEY" in result.err
    assert "sk-x" not in result.err


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_written_as_people_do(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """The version and a slash at the end are optional."""
    monkeypatch.setenv("TIDEMILL_BASE_URL", "http://127.0.0.1:9")
    assert shell.type("status", "--base-url", f"{shell.api.url}{suffix}").status == 0
    assert shell.api.requests == [("GET", "/v1/batches")]
