"""`tidemill serve`: what is typed, what the environment says, what is refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.cli.commands import serve
from tidemill.cli.commands.serve import ServeOptions, add_environment_flags, options_from
from tidemill.cli.main import main, make_parser


def options(*typed: str) -> ServeOptions:
    """Return what these words ask for."""
    return options_from(make_parser("serve").parse_args(add_environment_flags(["serve", *typed])))


def test_the_flags_are_vllms(tmp_path: Path) -> None:
    """Flags have vLLM's names if vLLM has them."""
    given = options(
        *("--host", "0.0.0.0", "--port", "0", "--uds", "/tmp/s"),  # noqa: S104, S108 - not opened
        *("--api-key", "a", "b", "--allowed-origins", "*", "--max-queued-requests", "5"),
        *("--max-body-bytes", "1M", "--drain-timeout", "7", "--data-dir", str(tmp_path)),
    )
    assert (given.host, given.port, given.uds) == ("0.0.0.0", 0, "/tmp/s")  # noqa: S104, S108
    assert (given.api_keys, given.allowed_origins) == (("a", "b"), ("*",))
    assert (given.max_queued_requests, given.max_body_bytes) == (5, 2**20)
    assert (given.drain_timeout, given.data_dir) == (7, tmp_path)


def test_engines_that_the_machine_has_no_room_for_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit status is 2, before anything is loaded."""
    assert main(["serve", "--device", "cpu", "-dp", "10000"]) == 2
    assert "--data-parallel-size 10000 needs 10000 cores" in capsys.readouterr().err


def test_keys_come_from_the_environment_unless_they_are_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everybody on a machine can read flags."""
    monkeypatch.setenv("TIDEMILL_SERVER_API_KEYS", "one two")
    assert options().api_keys == ("one", "two")
    assert options("--api-key", "three").api_keys == ("three",)


def test_a_container_is_configured_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given flags override the environment, which other commands do not read."""
    monkeypatch.setenv("TIDEMILL_SERVER_HOST", "1.2.3.4")
    monkeypatch.setenv("TIDEMILL_SERVER_PORT", "8080")
    monkeypatch.setenv("TIDEMILL_SERVER_FLAGS", "--max-model-len 99 --served-model-name 'a b'")
    given = options()
    assert (given.host, given.port, given.max_model_len) == ("1.2.3.4", 8080, 99)
    assert given.served_model_names == ("a b",)
    assert options("--port", "1", "--max-model-len", "5").max_model_len == 5
    assert add_environment_flags(["run", "-i", "x"]) == ["run", "-i", "x"]
    assert add_environment_flags([]) == []


def test_a_model_in_sagemaker_s_folder_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model flag overrides it."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(serve, "_SAGEMAKER_MODEL", tmp_path)
    served = []
    monkeypatch.setattr(serve, "run_server", lambda options, **_: served.append(options.model))
    for typed in ([], ["--model", "other"]):
        arguments = make_parser("serve").parse_args(["serve", *typed])
        serve.command(arguments)
    assert served == [str(tmp_path), "other"]


def test_half_of_https_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A key without a certificate is an error."""
    assert main(["serve", "--ssl-keyfile", "k"]) == 2
    assert "both --ssl-certfile and --ssl-keyfile" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " a", "a b", "schl\u00fcssel"])
def test_a_key_that_opens_or_blocks_the_server_is_refused(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unset variable results in an empty key."""
    assert main(["serve", "--api-key", key]) == 2
    assert (
        "--api-key: a key must be one or more printable ASCII characters" in capsys.readouterr().err
    )


def test_invalid_flags_in_the_environment_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error contains the variable's name."""
    monkeypatch.setenv("TIDEMILL_SERVER_FLAGS", "--host 'a")
    assert main(["serve"]) == 2
    assert "TIDEMILL_SERVER_FLAGS cannot be parsed: no closing" in capsys.readouterr().err


def test_the_addresses_for_clients_and_for_browsers_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither can open the wildcard address."""
    serve._log_address(("m",), (), "http://0.0.0.0:8000", has_keys=False)
    printed = capsys.readouterr().err
    assert "base URL for OpenAI clients: http://127.0.0.1:8000/v1\n" in printed
    assert "dashboard: http://127.0.0.1:8000/dashboard\n" in printed
