"""The emulator of a local cloud saves its state, and survives kills."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest

from localstack.emulator import LocalEmulator
from localstack.ministack import environment_for
from localstack.stacks import client_options
from localstack.state_folder import locked_state
from localstack.watchdog import Watchdog


@pytest.fixture
def watchdog() -> Any:
    """Return a watchdog of the test."""
    with Watchdog(1) as found:
        yield found


def wait_for(condition: Callable[[], object]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def make_function(functions: Any) -> None:
    """Create a Lambda: the state contains its code in separate files."""
    code = io.BytesIO()
    with zipfile.ZipFile(code, "w") as archive:
        archive.writestr("f.py", "def handler(event, context): return 1")
    functions.create_function(
        FunctionName="f",
        Runtime="python3.11",
        Handler="f.handler",
        Role="arn:aws:iam::000000000000:role/r",
        Code={"ZipFile": code.getvalue()},
    )


def cut_off(sqs: Any) -> None:
    """Begin a deployment that fails in the middle."""
    sqs.create_queue(QueueName="half")
    sqs.get_queue_url(QueueName="none")


def test_a_killed_emulator_comes_back_with_what_it_held(tmp_path: Path, watchdog: Watchdog) -> None:
    """It has the same address; a half finished deployment leaves nothing."""
    kept = tmp_path / "state"

    @contextmanager
    def emulator(folder: Path) -> Any:
        folder.mkdir()
        with (
            locked_state(kept, None, lambda _: None) as state,
            LocalEmulator(folder, watchdog, None, state) as found,
        ):
            options = client_options(environment_for(found.endpoint_url))
            functions = boto3.client("lambda", **options)
            yield found, state, boto3.client("sqs", **options), functions

    with emulator(tmp_path / "first") as (running, state, sqs, functions):
        make_function(functions)
        url = sqs.create_queue(QueueName="whole")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="kept")
        wait_for(lambda: any("kept" in path.read_text() for path in kept.glob("saved-*/sqs.json")))
        with pytest.raises(sqs.exceptions.QueueDoesNotExist), state.deploying():
            cut_off(sqs)
        running.process.kill()
        running.process.wait()
        running.restart()
        assert sqs.list_queues()["QueueUrls"] == [url]
    with emulator(tmp_path / "second") as (_, _, sqs, functions):
        assert functions.get_function(FunctionName="f")["Configuration"]["CodeSize"] > 0
        assert sqs.list_queues()["QueueUrls"] == [url]
        [message] = sqs.receive_message(QueueUrl=url)["Messages"]
        assert message["Body"] == "kept"
