"""Inputs that are not a file here: pipes, standard input, URLs."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import Answer, line, rows
from tidemill.offline.console.errors import TransferFailed
from tidemill.offline.files import http_transfer

SECRET = "X-Amz-Signature=0123456789abcdef&other=two%20words%20here"


def test_standard_input_is_run(spawn: Callable[..., Any], tmp_path: Path) -> None:
    """`-` reads a pipe to its end, then runs it."""
    out = tmp_path / "out.jsonl"
    process = spawn("-i", "-", "-o", out, stdin=subprocess.PIPE)
    process.communicate(line("a") + "\n" + line("b"), timeout=120)
    assert process.returncode == 0
    assert [row["custom_id"] for row in rows(out)] == ["a", "b"]


def test_a_named_pipe_is_run(run: Any, tmp_path: Path, tmp_dir: Path) -> None:
    """A pipe can be read once only, so it is copied, and the copy leaves no trace."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(line("a") + "\n",))
    writer.start()
    assert run("-i", pipe, "-o", tmp_path / "out", "--output-tmp-dir", tmp_dir) == 0
    writer.join()
    assert len(rows(tmp_path / "out")) == 1
    assert list(tmp_dir.iterdir()) == []


def test_a_url_is_run(run: Any, server: Any, tmp_path: Path, tmp_dir: Path) -> None:
    """Redirects are followed."""
    server.will(
        Answer(302, headers={"Location": "/moved"}),
        Answer(200, (line("a") + "\n" + line("b")).encode()),
    )
    out = tmp_path / "out"
    assert run("-i", f"{server.url}/in", "-o", out, "--output-tmp-dir", tmp_dir) == 0
    assert [row["custom_id"] for row in rows(out)] == ["a", "b"]
    assert [path for _, path, _ in server.received] == ["/in", "/moved"]
    assert list(tmp_dir.iterdir()) == []


def test_a_download_is_tried_again_on_faults_that_may_pass(
    run: Any,
    server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After a 503, a timeout and a truncated body, the fourth try starts over and is complete."""
    monkeypatch.setattr(http_transfer, "_TIMEOUT_SECONDS", 0.2)
    whole = (line("a") + "\n").encode()
    server.will(
        Answer(503, b"try later"),
        Answer(hang=True),
        Answer(200, whole[:10], claimed_length=len(whole)),
        Answer(200, whole),
    )
    assert run("-i", f"{server.url}/in?{SECRET}", "-o", tmp_path / "out") == 0
    assert len(rows(tmp_path / "out")) == 1
    assert len(server.received) == 4
    err = capsys.readouterr().err
    assert "HTTP 503 Service Unavailable: try later; retrying in" in err
    assert "the server timed out" in err
    assert "0123456789abcdef" not in err


def test_a_download_that_never_works_ends_after_five_tries(
    run: Any, server: Any, tmp_path: Path
) -> None:
    """The error contains the last failure; the output is not created."""
    server.will(Answer(500, b"broken"))
    with pytest.raises(TransferFailed, match=r"failed 5 times; last error: HTTP 500 .*broken"):
        run("-i", f"{server.url}/in", "-o", tmp_path / "out")
    assert len(server.received) == 5
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("status", [400, 403, 404, 429])
def test_a_download_is_not_tried_again_on_4xx(
    run: Any, server: Any, tmp_path: Path, status: int
) -> None:
    """It ends at once with the server's words, less the secrets that they quote."""
    server.will(Answer(status, f"<Code>Denied</Code>\n <Query>{SECRET}</Query>".encode()))
    with pytest.raises(TransferFailed) as failed:
        run("-i", f"{server.url}/in?{SECRET}", "-o", tmp_path / "out")
    assert len(server.received) == 1
    words = str(failed.value)
    assert f"HTTP {status}" in words
    assert "<Code>Denied</Code> <Query>…</Query>" in words
    assert failed.value.exit_status == 1


def test_an_unreachable_server_is_reported_without_secrets(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused connection is retried, then ends the run."""
    with pytest.raises(TransferFailed, match="ConnectError") as failed:
        run("-i", f"http://user:password@127.0.0.1:9/in?{SECRET}", "-o", tmp_path / "out")
    stderr = str(failed.value) + capsys.readouterr().err
    assert "http://127.0.0.1:9/in" in stderr
    for secret in ("password", "0123456789abcdef", "two", "user"):
        assert secret not in stderr


def test_a_full_disk_for_the_copy_is_reported(spawn: Callable[..., Any], tmp_path: Path) -> None:
    """The error names the folder and the flag that changes it."""
    flags = ["--output-tmp-dir", tmp_path]
    limited = ["--file-bytes", "100000"]
    process = spawn(
        "-i", "-", "-o", tmp_path / "out", *flags, options=limited, stdin=subprocess.PIPE
    )
    _, err = process.communicate(line("a", say="x" * 3_000_000), timeout=120)
    assert process.returncode == 1
    words = f"copying standard input to {tmp_path} failed: File too large. Pass --output-tmp-dir"
    assert words in err
    assert "Traceback" not in err
