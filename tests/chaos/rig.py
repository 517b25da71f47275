"""The proxy of `proxy.py` as a process, for as long as a test needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.request import urlopen

from localstack.ministack import running_server, with_free_port
from tests.emulators import Emulator

_SCRIPT = Path(__file__).with_name("proxy.py")


def running_proxy(
    emulator: Emulator, folder: Path, seed: int, rate: float
) -> AbstractContextManager[str]:
    """Run a proxy before the emulator that lets a share `rate` of the requests go wrong."""
    folder.mkdir()
    command = [sys.executable, str(_SCRIPT), "--target", emulator.endpoint_url]
    command += ["--seed", str(seed), "--rate", str(rate)]
    return with_free_port(lambda port: _proxy_at(port, command, folder))


@contextmanager
def _proxy_at(port: int, command: list[str], folder: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    command = [*command, "--port", str(port)]
    with running_server(command, _counts_url(url), {}, folder):
        yield url


def read_counts(url: str) -> dict[str, int]:
    """Return how many requests a proxy has treated in which way."""
    with urlopen(_counts_url(url)) as answer:  # noqa: S310 - our own loopback address
        counts: dict[str, int] = json.load(answer)
    return counts


def _counts_url(url: str) -> str:
    return f"{url}/-/counts"
