"""Tests of errors from the server, and of retries."""

from __future__ import annotations

import pytest

from tests.cli.api_rig import Shell
from tests.cli.fake_api import Fault

COMMANDS = ["resume", "status", "results", "cancel"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_id_that_is_not_there_is_named(shell: Shell, command: str) -> None:
    """The error contains the server's message."""
    result = shell.type(command, "batch_none/../x")
    assert (result.status, result.out) == (1, "")
    assert "There is no" in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_key_is_reported(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The error names the key's variable, and never contains the key itself."""
    monkeypatch.setenv("TIDEMILL_API_KEY", "tm_wrong")
    result = shell.type(command, "batch_1")
    assert (result.status, result.out) == (8, "")
    assert "rejected the API key in TIDEMILL_API_KEY (HTTP 401 Unauthorized)" in result.err
    assert "tm_wrong" not in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_not_there_is_tried_a_few_times(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Pauses grow exponentially."""
    monkeypatch.setenv("TIDEMILL_BASE_URL", "http://127.0.0.1:9")
    result = shell.type(command, "batch_1")
    assert (result.status, result.out) == (7, "")
    assert "http://127.0.0.1:9 cannot be reached" in result.err
    assert shell.pauses == [0.5, 1.0, 2.0, 4.0]


def test_retry_after_replaces_the_backoff(shell: Shell) -> None:
    """The server's delay is used, regardless of the backoff."""
    shell.api.faults = [
        Fault("GET", "/v1/batches", status=429, headers={"Retry-After": "7"}),
        Fault("GET", "/v1/batches", status=503, headers={"Retry-After": "3"}),
    ]
    assert shell.type("status").status == 0
    assert shell.pauses == [7.0, 3.0]


def test_a_daily_limit_is_not_waited_for(shell: Shell) -> None:
    """The error contains the limit and the time until its end."""
    words = b'{"error": {"message": "1,000 requests a day.", "code": "requests_per_day"}}'
    shell.api.faults = [
        Fault("GET", "/v1/batches", status=429, headers={"Retry-After": "36000"}, body=words)
    ]
    result = shell.type("status")
    assert result.status == 7
    assert "1,000 requests a day; it requests a retry after 10 h 0 min" in result.err
    assert shell.pauses == []


@pytest.mark.parametrize("body", [b"<html>Hello</html>", b"[]", b"{}", b'{"data": 5}'])
def test_another_server_is_detected(shell: Shell, body: bytes) -> None:
    """Any response of such a server is an error with advice."""
    shell.api.faults = [Fault("GET", "/v1/batches", status=200, body=body)]
    result = shell.type("status")
    assert (result.status, result.out) == (1, "")
    assert "not a response of Tidemill's API: check TIDEMILL_BASE_URL or --base-url" in result.err
