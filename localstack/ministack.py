"""Runs MiniStack, an AWS emulator without Docker, as a child process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from localstack.watchdog import Watchdog

_ROOT = Path(__file__).parent.parent
_START_SECONDS = 60
# A server without state needs no orderly shutdown: it would wait for its clients' idle
# connections.
STOP_SECONDS = 1
_PORT_TRIES = 3

_Entered = TypeVar("_Entered")


class EmulatorMissing(Exception):
    """MiniStack is not installed; the message has the remedy."""


class PortTaken(Exception):
    """The emulator's port is in use; the message has the remedy."""


class ServerEnded(Exception):
    """A server ended before it replied."""


class ServerSilent(Exception):
    """A running server does not reply."""


def find_ministack() -> Path:
    """Return the executable: from `MINISTACK`, or from the checkout's own environment."""
    found = os.environ.get("MINISTACK") or shutil.which(
        "ministack", path=str(_ROOT / ".venv-ministack/bin")
    )
    if found is None:
        raise EmulatorMissing(
            "MiniStack is not installed: run `make test`, which installs it into .venv-ministack, "
            "or set MINISTACK to its executable"
        )
    return Path(found)


def free_port() -> int:
    """Return an unused port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_free(port: int) -> None:
    """Raise PortTaken unless a server can listen there: another server would reply instead."""
    with socket.socket() as probe:
        # As servers do: connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as exc:
            raise PortTaken(
                f"port {port} is not available: {exc}; choose another one with --port"
            ) from exc


@dataclass(frozen=True, slots=True)
class IamEnforcement:
    """Makes an emulator check every request against IAM policies, as AWS does.

    Our policies deny unencrypted requests, so it serves TLS, with this certificate and key,
    which clients trust by their `authority` (all PEM).
    """

    certificate: Path
    key: Path
    authority: Path


def environment_for(endpoint_url: str, authority: Path | None = None) -> dict[str, str]:
    """Return the variables that direct every AWS client of a process to an emulator."""
    names = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")
    trust = dict.fromkeys(names, str(authority)) if authority else {}
    return trust | {
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_ENDPOINT_URL_S3": endpoint_url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def running_server(
    command: list[str],
    endpoint_url: str,
    environment: Mapping[str, str],
    folder: Path,
    *,
    stop_seconds: float = STOP_SECONDS,
    watchdog: Watchdog | None = None,
    lock: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block is left; it is killed `stop_seconds` after its stop signal.

    It ends with this process if a `watchdog` is given, and inherits the open file `lock`.
    Raises ServerEnded if it ends before it replies, ServerSilent if it does not reply.
    """
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for the user's process; users of the server end first.
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
        if watchdog is not None:
            watchdog.register(process.pid)
        try:
            _wait_for(endpoint_url, process, folder / "server.log")
            yield process
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(stop_seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the Lambdas that it has started
                process.wait()
                if watchdog is not None:
                    watchdog.unregister(process.pid)


@contextmanager
def with_free_port(start: Callable[[int], AbstractContextManager[_Entered]]) -> Iterator[_Entered]:
    """Enter `start` with a free port; if it is taken in the meantime, another one is tried."""
    with ExitStack() as stack:
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                entered = stack.enter_context(start(free_port()))
                break
            except (PortTaken, ServerEnded):
                if not tries_left:
                    raise
        yield entered


def running_ministack(
    folder: Path,
    *,
    enforcement: IamEnforcement | None = None,
    command: Sequence[str | Path] = (),
) -> AbstractContextManager[str]:
    """Run MiniStack on the loopback address and yield its endpoint; `folder` is its own.

    `command` replaces the one that starts it. Its content is lost when it ends.
    """
    words = [*map(str, command or [find_ministack()])]
    return with_free_port(lambda port: _ministack_at(port, folder, enforcement, words))


@contextmanager
def _ministack_at(
    port: int, folder: Path, enforcement: IamEnforcement | None, command: list[str]
) -> Iterator[str]:
    check_free(port)
    endpoint_url = f"{'https' if enforcement else 'http'}://127.0.0.1:{port}"
    environment = ministack_environment(
        endpoint_url, folder, enforcement.authority if enforcement else None
    )
    if enforcement is not None:
        environment |= {
            "AUTH": "true",
            "USE_SSL": "1",
            "MINISTACK_SSL_CERT": str(enforcement.certificate),
            "MINISTACK_SSL_KEY": str(enforcement.key),
        }
    with running_server(command, endpoint_url, environment, folder):
        yield endpoint_url


def ministack_environment(
    endpoint_url: str, folder: Path, authority: Path | None = None
) -> dict[str, str]:
    """Return the variables of a MiniStack that will listen at `endpoint_url`."""
    # Its Lambdas inherit its environment: the user may have another cloud in theirs.
    return environment_for(endpoint_url, authority) | {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(urlsplit(endpoint_url).port),
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "TMPDIR": str(folder),
    }


def running_moto(folder: Path) -> AbstractContextManager[str]:
    """Run moto's server, whose checks differ from MiniStack's, and yield its endpoint."""
    return with_free_port(lambda port: _moto_at(port, folder))


@contextmanager
def _moto_at(port: int, folder: Path) -> Iterator[str]:
    endpoint_url = f"http://127.0.0.1:{port}"
    server = str(Path(sys.executable).parent / "moto_server")
    with running_server([server, "-H", "127.0.0.1", "-p", str(port)], endpoint_url, {}, folder):
        yield endpoint_url


def _wait_for(endpoint_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last_line = (
                log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            )
            raise ServerEnded(f"the emulator ended with status {process.returncode}: {last_line}")
        try:
            with urlopen(endpoint_url, timeout=2):  # noqa: S310 - our own loopback address
                return
        except URLError as exc:
            if not isinstance(exc.reason, (ConnectionError, TimeoutError)):
                return  # it replies, if only with an error
        except (ConnectionError, TimeoutError):
            pass
        time.sleep(0.05)
    raise ServerSilent(f"the emulator did not reply within {_START_SECONDS} s")
