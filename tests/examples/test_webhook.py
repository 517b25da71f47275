"""examples/webhook.py, run as its docstring says, receives Tidemill's webhooks."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tidemill.handler.finalize.webhook import sign
from tidemill.handler.tenants.tenants import new_secret

ROOT = Path(__file__).parents[2]
BODY = (
    b'{"id":"evt_1","object":"event","created_at":1,"type":"batch.completed",'
    b'"data":{"id":"batch_1"}}'
)
SECRET = new_secret()


class Example:
    """The receiver in a separate process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}/hooks"

    def post(self, body: bytes, **headers: str) -> int:
        """Send a request and return the status of its answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(self.url, content=body, headers=named).status_code

    def output(self, num_lines: int) -> list[str]:
        """Return the first lines that it prints."""
        assert self.process.stdout is not None
        output = b""
        while output.count(b"\n") < num_lines:
            ready, _, _ = select.select([self.process.stdout], [], [], 20)
            assert ready, f"it prints no more than {output!r}"
            output += os.read(self.process.stdout.fileno(), 1000)
        return output.decode().splitlines()


@pytest.fixture
def example() -> Iterator[Example]:
    """Return the receiver once it listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "examples/webhook.py", str(port)],
        cwd=ROOT,
        env=os.environ | {"OPENAI_WEBHOOK_SECRET": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "it does not start"
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield Example(process, port)
    finally:
        process.kill()
        process.communicate()


def test_the_example_hears_each_event_once_and_no_forged_one(example: Example) -> None:
    """A repeated event is answered but not printed again."""
    now = int(time.time())

    def signed(body: bytes, secret: str, event: str) -> int:
        signature = sign(secret, event, now, body)
        return example.post(
            body, webhook_id=event, webhook_timestamp=str(now), webhook_signature=signature
        )

    assert signed(BODY, new_secret(), "evt_1") == 400
    assert example.post(BODY) == 400
    for _ in range(2):
        assert signed(BODY, SECRET, "evt_1") == 204
    assert signed(BODY.replace(b"_1", b"_2"), SECRET, "evt_2") == 204
    assert example.output(2) == ["batch.completed batch_1", "batch.completed batch_2"]
