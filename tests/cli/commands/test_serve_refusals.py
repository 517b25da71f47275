"""Tests of invalid or vLLM flags of `tidemill serve`, which are reported before loading."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.cli.main import main
from tidemill.server.settings import ServerSettings
from tidemill.server.uvicorn_server import check_address


@pytest.fixture
def taken() -> Iterator[str]:
    """Yield a port that is in use."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield str(held.getsockname()[1])


def test_a_port_in_use_is_reported_before_a_model_loads(
    taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check does not need to load a model."""
    assert main(["serve", "--port", taken]) == 2
    stderr = capsys.readouterr().err
    assert f"tidemill: cannot listen on 127.0.0.1:{taken}: Address already in use\n" in stderr
    assert "loading" not in stderr


@pytest.mark.parametrize("flag", [("--reuse-sampled",), ("--reuse-max-size", "1G")])
def test_flags_of_reuse_need_it(flag: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """They would do nothing."""
    assert main(["serve", *flag]) == 2
    assert "require --reuse" in capsys.readouterr().err


def test_a_socket_in_a_missing_folder_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The error contains the folder."""
    assert main(["serve", "--uds", "/no/such/folder/socket"]) == 2
    assert "/no/such/folder is not a writable folder" in capsys.readouterr().err


def test_a_socket_that_cannot_be_created_is_reported_before_a_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path may be a file, a socket in use, or too long."""
    file, listening, left = tmp_path / "file", tmp_path / "heard", tmp_path / "left"
    file.touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
        server.listen()
        for path, words in (
            (file, f"{file} exists and is not a socket"),
            (listening, "another server is listening there"),
            (tmp_path / ("x" * 120), "AF_UNIX path too long"),
        ):
            assert main(["serve", "--uds", str(path)]) == 2
            assert words in capsys.readouterr().err
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(left))
    check_address(ServerSettings(uds=str(left)))


def test_an_invalid_certificate_is_reported_before_a_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error contains both paths."""
    file = tmp_path / "file"
    file.touch()
    missing = tmp_path / "no"
    for key, words in (
        (file, f"{file} and {file} are not a certificate and its private key"),
        (missing, f"{missing} cannot be read: No such file or directory"),
    ):
        typed = ["serve", "--port", "0", "--ssl-certfile", str(file), "--ssl-keyfile", str(key)]
        assert main(typed) == 2
        stderr = capsys.readouterr().err
        assert words in stderr
        assert "loading" not in stderr


def test_a_model_may_stand_behind_the_command_as_in_vllm(
    taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what `--model` names; with that, too, it belongs to no flag."""
    assert main(["serve", "/no/such/model", "--port", taken]) == 2
    assert "--model /no/such/model: folder not found" in capsys.readouterr().err
    assert main(["serve", "one", "--model", "two"]) == 2
    assert "unexpected argument 'one'" in capsys.readouterr().err


def test_flags_of_vllms_server_are_taken_with_a_word(
    taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags without effect are ignored; others get advice."""
    flags = "--enable-auto-tool-choice --gpu-memory-utilization 0.9 --uvicorn-log-level info"
    assert main(["serve", "--port", taken, *flags.split()]) == 2
    assert (
        "vLLM flags without effect here: --enable-auto-tool-choice, --gpu-memory-utilization, "
        "--uvicorn-log-level\n"
    ) in capsys.readouterr().err
    assert main(["serve", "--root-path", "/llm"]) == 2
    assert "vLLM's --root-path is not supported" in capsys.readouterr().err
