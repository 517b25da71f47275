"""MiniStack, an AWS emulator without Docker, as a child process of whoever needs it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

_ROOT = Path(__file__).parent.parent
_START_SECONDS = 60
# A server that keeps nothing has nothing to end in order: it would wait for its clients' idle
# connections.
_STOP_SECONDS = 1
_KEEP_STATE_SECONDS = 30
_PORT_TRIES = 3


class EmulatorMissing(Exception):
    """MiniStack is not installed; the message says how to mend that."""


class PortTaken(Exception):
    """Somebody else listens where the emulator is to; the message says how to mend that."""


class ServerEnded(Exception):
    """A server was no more before it answered."""


def find_ministack() -> Path:
    """Return the executable: `MINISTACK` names it, or the checkout's own environment has it."""
    found = os.environ.get("MINISTACK") or shutil.which(
        "ministack", path=str(_ROOT / ".venv-ministack/bin")
    )
    if found is None:
        raise EmulatorMissing(
            "MiniStack is not installed: `make test` installs it into .venv-ministack, "
            "or name its executable in MINISTACK"
        )
    return Path(found)


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _check_free(port: int) -> None:
    """Raise PortTaken unless a server can listen there: who does would answer in its place."""
    with socket.socket() as probe:
        # As servers do: what is left of connections that have ended is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as exc:
            raise PortTaken(
                f"port {port} cannot be listened on: {exc}; --port names another one"
            ) from exc


@dataclass(frozen=True, slots=True)
class Enforcement:
    """Makes an emulator check every request against IAM's policies, as AWS does.

    Our policies refuse what is not encrypted: it serves TLS then, with this certificate and key,
    which clients trust by their `authority` (all PEM).
    """

    certificate: Path
    key: Path
    authority: Path


def environment_for(endpoint_url: str, authority: Path | None = None) -> dict[str, str]:
    """Return the variables that send every AWS client of a process to an emulator."""
    names = ("AWS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE")
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
    stop_seconds: float = _STOP_SECONDS,
) -> Iterator[None]:
    """Run a server until the block is left; it is killed `stop_seconds` after it was told to end.

    Raises ServerEnded when it ends before it answers, RuntimeError when it does not answer.
    """
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for the one who started us; those who use the server end first.
            start_new_session=True,
        )
        try:
            _wait_for(endpoint_url, process)
            yield
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(stop_seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the Lambdas that it has started
                process.wait()


@contextmanager
def on_a_free_port(start: Callable[[int], AbstractContextManager[str]]) -> Iterator[str]:
    """Enter what `start` makes of a port that nobody has; one taken meanwhile is tried again."""
    with ExitStack() as stack:
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                endpoint_url = stack.enter_context(start(free_port()))
                break
            except (PortTaken, ServerEnded):
                if not tries_left:
                    raise
        yield endpoint_url


def running_ministack(
    folder: Path,
    port: int | None = None,
    *,
    state: Path | None = None,
    enforcement: Enforcement | None = None,
) -> AbstractContextManager[str]:
    """Run MiniStack on the loopback address and yield its endpoint; `folder` is its own.

    What is in it is gone when it ends, unless `state` names a folder to keep it in.
    """

    def start(port: int) -> AbstractContextManager[str]:
        return _ministack_at(port, folder, state, enforcement)

    return on_a_free_port(start) if port is None else start(port)


@contextmanager
def _ministack_at(
    port: int, folder: Path, state: Path | None, enforcement: Enforcement | None
) -> Iterator[str]:
    _check_free(port)
    endpoint_url = f"{'https' if enforcement else 'http'}://127.0.0.1:{port}"
    # Its Lambdas get what it has: whoever typed may have another cloud in the environment.
    environment = environment_for(endpoint_url, enforcement.authority if enforcement else None) | {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "TMPDIR": str(folder),
    }
    if enforcement is not None:
        environment |= {
            "AUTH": "true",
            "USE_SSL": "1",
            "MINISTACK_SSL_CERT": str(enforcement.certificate),
            "MINISTACK_SSL_KEY": str(enforcement.key),
        }
    if state is not None:
        environment |= {
            "PERSIST_STATE": "1",
            "STATE_DIR": str(state),
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(state / "s3"),
        }
    stop_seconds = _STOP_SECONDS if state is None else _KEEP_STATE_SECONDS
    with running_server(
        [str(find_ministack())], endpoint_url, environment, folder, stop_seconds=stop_seconds
    ):
        yield endpoint_url


def running_moto(folder: Path) -> AbstractContextManager[str]:
    """Run moto's server, which checks other things than MiniStack does, and yield its endpoint."""
    return on_a_free_port(lambda port: _moto_at(port, folder))


@contextmanager
def _moto_at(port: int, folder: Path) -> Iterator[str]:
    endpoint_url = f"http://127.0.0.1:{port}"
    server = str(Path(sys.executable).parent / "moto_server")
    with running_server([server, "-H", "127.0.0.1", "-p", str(port)], endpoint_url, {}, folder):
        yield endpoint_url


def _wait_for(endpoint_url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerEnded(f"the emulator ended with status {process.returncode}")
        try:
            with urlopen(endpoint_url, timeout=2):  # noqa: S310 - our own loopback address
                return
        except URLError as exc:
            if not isinstance(exc.reason, (ConnectionError, TimeoutError)):
                return  # it answers, if only with an error
        except (ConnectionError, TimeoutError):
            pass
        time.sleep(0.05)
    raise RuntimeError(f"the emulator did not answer within {_START_SECONDS} s")
