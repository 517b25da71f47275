"""A server from the first socket to the last answer."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from server.connections import connections_of
from server.gate import Gate
from server.settings import ServerSettings

Heard = Callable[[Callable[[], object]], AbstractContextManager[None]]
"""While entered, what it is given is called at the first signal."""

Beside = Callable[[], AbstractAsyncContextManager[None]]
"""While entered, in the server's loop, something is done beside answering."""


def make_server(
    app: ASGIApp,
    gate: Gate,
    settings: ServerSettings,
    *,
    heard: Heard,
    listening: Callable[[str], None],
    beside: Beside = nullcontext,
) -> Server:
    """Return a server, which `serve` runs until a signal is heard and those inside have finished.

    `listening` is called with the address once there is one; `beside` is entered for as long.
    """
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        http=connections_of(settings),
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # what strangers send is no news
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(settings.keep_alive_seconds),
        timeout_graceful_shutdown=1,
        backlog=2048,
    )
    return Server(
        config, gate, settings.drain_seconds, heard=heard, listening=listening, beside=beside
    )


class CertificateRefused(Exception):
    """A certificate or key that cannot be served with; the message is for who started the server.

    (No `OSError`, as which ssl raises it: an address has nothing to do with it.)
    """


def check_address(settings: ServerSettings) -> None:
    """Raise OSError where a server cannot listen, by taking its address and giving it back.

    Raises CertificateRefused, too.
    """
    if settings.ssl_certfile is not None and settings.ssl_keyfile is not None:
        _check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    if settings.uds is not None:
        _check_socket(Path(settings.uds))
        return
    for family, kind, proto, _, address in socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, proto) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)


def _check_certificate(certificate: Path, key: Path) -> None:
    try:
        for path in (certificate, key):
            path.open("rb").close()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=lambda: "")  # never asked for
    except ssl.SSLError as exc:
        raise CertificateRefused(
            f"{certificate} and {key} are no certificate and its key, both in PEM and not locked"
        ) from exc
    except OSError as exc:
        raise CertificateRefused(f"{exc.filename} cannot be read: {exc.strerror}") from exc


def _check_socket(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise NotADirectoryError(f"{folder} is no folder that can be written to")
    if path.exists() and not path.is_socket():
        raise FileExistsError("there is a file of that name, which is no socket")
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return  # nobody is behind it, or it is of a server that has ended
    raise FileExistsError("another server listens there")


class Server(uvicorn.Server):
    """Ends in order: the gate is closed, those inside finish, then the sockets close."""

    def __init__(
        self,
        config: uvicorn.Config,
        gate: Gate,
        drain_seconds: float,
        *,
        heard: Heard,
        listening: Callable[[str], None],
        beside: Beside,
    ) -> None:
        super().__init__(config)
        self._gate = gate
        self._drain_seconds = drain_seconds
        self._heard = heard
        self._listening = listening
        self._beside = beside

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, with what is done beside that."""
        async with self._beside():
            await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever started the server, who says when one is heard."""
        loop = asyncio.get_running_loop()
        draining: list[asyncio.Task[None]] = []

        def drain() -> None:
            draining.append(loop.create_task(self._drain()))

        with self._heard(lambda: loop.call_soon_threadsafe(drain)):
            yield

    async def on_tick(self, counter: int) -> bool:
        """Say whether it is time to end: told to, or with nothing behind the gate any more."""
        return await super().on_tick(counter) or self._gate.is_lost

    async def _drain(self) -> None:
        self._gate.close()
        clock = asyncio.get_running_loop().time
        ends = clock() + self._drain_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._gate.wait_until_empty()
        # Files that come or go are behind no gate: they have the time that is left.
        self.config.timeout_graceful_shutdown = max(1, math.ceil(ends - clock()))
        self.should_exit = True

    def _log_started_message(self, listeners: object) -> None:
        del listeners
        if self.config.uds:
            self._listening(f"unix:{self.config.uds}")
            return
        [server, *_] = self.servers
        host, port, *_ = server.sockets[0].getsockname()
        scheme = "https" if self.config.is_ssl else "http"
        shown = f"[{host}]" if ":" in host else host
        self._listening(f"{scheme}://{shown}:{port}")


def allow_many_files() -> None:
    """Let this process have as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # such as more than macOS has
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
