"""What a server refuses, and how long it is asked again."""

from __future__ import annotations

import pytest

from tests.cli.api_rig import Shell
from tests.cli.fake_api import Fault

COMMANDS = ["resume", "status", "results", "cancel"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_id_that_is_not_there_is_named(shell: Shell, command: str) -> None:
    """In the server's words."""
    said = shell.type(command, "batch_none/../x")
    assert (said.status, said.out) == (1, "")
    assert "There is no" in said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_key_is_said_to_be_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With the variable that holds it, and never the key itself."""
    monkeypatch.setenv("TIDEMILL_API_KEY", "tm_wrong")
    said = shell.type(command, "batch_1")
    assert (said.status, said.out) == (8, "")
    assert "does not accept the key in TIDEMILL_API_KEY (HTTP 401 Unauthorized)" in said.err
    assert "tm_wrong" not in said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_not_there_is_tried_a_few_times(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With longer and longer pauses."""
    monkeypatch.setenv("TIDEMILL_BASE_URL", "http://127.0.0.1:9")
    said = shell.type(command, "batch_1")
    assert (said.status, said.out) == (7, "")
    assert "http://127.0.0.1:9 cannot be reached" in said.err
    assert shell.pauses == [0.5, 1.0, 2.0, 4.0]


def test_what_the_server_asks_to_wait_is_waited(shell: Shell) -> None:
    """Whatever the backoff would be."""
    shell.api.faults = [
        Fault("GET", "/v1/batches", status=429, headers={"Retry-After": "7"}),
        Fault("GET", "/v1/batches", status=503, headers={"Retry-After": "3"}),
    ]
    assert shell.type("status").status == 0
    assert shell.pauses == [7.0, 3.0]


def test_nobody_waits_for_a_day(shell: Shell) -> None:
    """A limit of the day is said, with the time after which it ends."""
    words = b'{"error": {"message": "1,000 requests a day.", "code": "requests_per_day"}}'
    shell.api.faults = [
        Fault("GET", "/v1/batches", status=429, headers={"Retry-After": "36000"}, body=words)
    ]
    said = shell.type("status")
    assert said.status == 7
    assert "1,000 requests a day; it asks to come back in 10 h 0 min" in said.err
    assert shell.pauses == []


@pytest.mark.parametrize("body", [b"<html>Hello</html>", b"[]", b"{}", b'{"data": 5}'])
def test_a_server_of_another_kind_is_told_apart(shell: Shell, body: bytes) -> None:
    """Whatever it answers."""
    shell.api.faults = [Fault("GET", "/v1/batches", status=200, body=body)]
    said = shell.type("status")
    assert (said.status, said.out) == (1, "")
    assert "not as Tidemill's API does: is TIDEMILL_BASE_URL or --base-url right?" in said.err
