"""A server of ours as a process, for measurements and tests from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

import httpx

from bench.processes import RunFailed, tail
from tidemill import demo

_ADDRESS = re.compile(rb" at http://([\w.]+):(\d+)")
_STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Place:
    """Address, process and model of a server, and its API key, if any."""

    host: str
    port: int
    pid: int
    model: str = demo.NAME
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that a request to it needs."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def url(self) -> str:
        """Return its address for clients."""
        return f"http://{self.host}:{self.port}"

    def get(self, path: str) -> str:
        """Return its answer at a path."""
        answer = httpx.get(f"{self.url}{path}", headers=self.headers, timeout=60)
        return answer.raise_for_status().text


@contextmanager
def serving(*flags: str, log: Path, key: str = "") -> Iterator[Place]:
    """Start `tidemill serve` on a free port, and stop it in the end like a container.

    With a `key` no other client is admitted.

    Its output goes to `log`. Raises `RunFailed` with the last lines if it does not start listening,
    or ends with a status other than 0.
    """
    command = [sys.executable, "-m", "tidemill", "serve", "--port", "0", *flags]
    command += ["--api-key", key] if key else []
    with (
        log.open("wb") as held,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        copying = None
        try:
            host, port = _address(process.stdout, held, log)
            copying = Thread(target=_copy, args=(process.stdout, held), daemon=True)
            copying.start()
            yield Place(host, port, process.pid, key=key)
        finally:
            process.terminate()
            try:
                status = process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            if copying is not None:
                copying.join()
    if status != 0:
        raise RunFailed(f"the server ended with status {status}.\n{tail(log)}")


def _address(output: IO[bytes], held: IO[bytes], log: Path) -> tuple[str, int]:
    """Return a server's address, once it prints it."""
    for line in output:
        held.write(line)
        held.flush()
        if found := _ADDRESS.search(line):
            return found[1].decode(), int(found[2])
    raise RunFailed(f"the server did not start.\n{tail(log)}")


def _copy(output: IO[bytes], held: IO[bytes]) -> None:
    for line in output:
        held.write(line)
        held.flush()
