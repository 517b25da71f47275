"""Batches of a server process with OpenAI's SDK: many lines, kills, two servers, a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.flow import has_ended, poll, submit, write_file
from tests.server.local.rig import MODEL

SCRIPT = Path(__file__).parent / "serve_process.py"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


@contextmanager
def served(folder: Path, *flags: str, command: tuple[str, ...] = ()) -> Iterator[Served]:
    """Serve a folder in a separate process, which is killed at the end."""
    process = subprocess.Popen(
        [
            *(command or (sys.executable, str(SCRIPT))),
            *("serve", "--port", "0", "--served-model-name", MODEL, "--data-dir", str(folder)),
            *flags,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        output = [*iter_until(process.stderr, " at http://")]
        assert " at http://" in output[-1], output
        url = f"{output[-1].rpartition(' at ')[2].strip()}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            yield Served(process, client)
    finally:
        process.kill()
        process.communicate()


class Served:
    """A running server and a client."""

    def __init__(self, process: subprocess.Popen[str], client: openai.OpenAI) -> None:
        self.process = process
        self.client = client


def test_five_thousand_requests_are_answered(tmp_path: Path) -> None:
    """Each request has a row, in input order."""
    write_file(tmp_path / "in.jsonl", "/v1/chat/completions", [CHAT] * 5000)
    with served(tmp_path / "served") as server:
        batch = submit(server.client, tmp_path / "in.jsonl", "/v1/chat/completions")
        batch = poll(server.client, batch, has_ended)
        assert custom_ids(server.client, batch) == [f"request-{number}" for number in range(5000)]
    assert batch.status == "completed"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_batch_resumes_however_the_server_ends(tmp_path: Path, end: signal.Signals) -> None:
    """Each line has one row in the end, and no reported row is lost."""
    path, folder = tmp_path / "in.jsonl", tmp_path / "served"
    write_file(path, "/v1/chat/completions", [{**CHAT, "wait": 0.3}] * 600)
    with served(folder) as server:
        batch = submit(server.client, path, "/v1/chat/completions")
        batch = poll(server.client, batch, lambda batch: completed(batch) > 0)
        assert not has_ended(batch)
        server.process.send_signal(end)
        server.process.wait()
    with served(folder) as server:
        counts = [completed(batch), completed(server.client.batches.retrieve(batch.id))]
        batch = poll(server.client, batch, has_ended)
        assert custom_ids(server.client, batch) == [f"request-{number}" for number in range(600)]
    counts.append(completed(batch))
    assert batch.status == "completed"
    assert counts == sorted(counts)


def test_a_folder_has_one_server_at_a_time(tmp_path: Path) -> None:
    """A second server is refused with a message before it loads anything."""
    with served(tmp_path) as server:
        refused = subprocess.run(
            [sys.executable, str(SCRIPT), "serve", "--port", "0", "--data-dir", str(tmp_path)],
            capture_output=True,
            check=False,
            text=True,
        )
        assert server.client.files.list().data == []
    assert refused.returncode == 2
    assert f"in use by another server (process {server.process.pid})" in refused.stderr
    assert "loading" not in refused.stderr


def test_a_server_without_a_usable_default_folder_still_serves(tmp_path: Path) -> None:
    """Containers without write access need it; the files are deleted at the end."""
    (tmp_path / "cache").touch()
    environment = {**os.environ, "TIDEMILL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(SCRIPT), "serve", "--uds", str(tmp_path / "socket")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        output = "".join(iter_until(process.stderr, "serving "))
        process.terminate()
        assert process.wait() == 0
    assert "cannot create the data folder" in output
    assert "until the server stops" in output


def iter_until(lines: Iterable[str], word: str) -> Iterator[str]:
    """Yield lines up to the one that contains a word."""
    for line in lines:
        yield line
        if word in line:
            return


def test_a_full_disk_delays_a_batch_with_a_message_and_loses_nothing(tmp_path: Path) -> None:
    """Uploads are refused, and the batch continues once there is space."""
    bodies = [{**CHAT, "messages": [{"role": "user", "content": "x" * 1000}]}] * 600
    write_file(tmp_path / "in.jsonl", "/v1/chat/completions", bodies)
    folder = tmp_path / "served"
    with served(folder) as server, (tmp_path / "in.jsonl").open("rb") as file:
        uploaded = server.client.files.create(file=file, purpose="batch")
    with served(folder, "--file-bytes", "200000") as server:
        with pytest.raises(openai.APIStatusError) as refused:
            server.client.files.create(file=b"x" * 300_000, purpose="batch")
        batch = server.client.batches.create(
            input_file_id=uploaded.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        held = poll(server.client, batch, lambda batch: batch.errors is not None)
    assert refused.value.status_code == 507
    assert refused.value.code == "disk_full"
    assert held.status == "in_progress"
    assert held.errors is not None
    assert [error.code for error in held.errors.data or []] == ["disk_full"]
    with served(folder) as server:
        batch = poll(server.client, batch, has_ended)
        assert batch.errors is None
        assert custom_ids(server.client, batch) == [f"request-{number}" for number in range(600)]


def completed(batch: openai.types.Batch) -> int:
    """Return the reported number of completed rows."""
    assert batch.request_counts is not None
    return batch.request_counts.completed


def custom_ids(client: openai.OpenAI, batch: openai.types.Batch) -> list[str]:
    """Return the custom IDs of an output, in order."""
    assert batch.output_file_id is not None
    lines = client.files.content(batch.output_file_id).text.splitlines()
    return [json.loads(line)["custom_id"] for line in lines]
