"""Uvicorn server: listening sockets, signals and graceful shutdown."""

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

from .admission import AdmissionControl
from .http_protocol import protocol_factory
from .settings import ServerSettings

OnSignal = Callable[[Callable[[], object]], AbstractContextManager[None]]
"""Registers a callback for the first signal, while entered."""

Lifespan = Callable[[], AbstractAsyncContextManager[None]]
"""Background tasks of the server's event loop, running while entered."""


def make_server(
    app: ASGIApp,
    admission: AdmissionControl,
    settings: ServerSettings,
    *,
    on_signal: OnSignal,
    on_listening: Callable[[str], None],
    lifespan: Lifespan = nullcontext,
) -> Server:
    """Return a server that runs until a signal arrives and the requests in flight have finished.

    `on_listening` is called with the bound address; `lifespan` is entered while it serves.
    """
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        http=protocol_factory(settings),
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # malformed requests need no log line
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(settings.keep_alive_seconds),
        timeout_graceful_shutdown=1,
        backlog=2048,
    )
    return Server(
        config,
        admission,
        settings.drain_seconds,
        on_signal=on_signal,
        on_listening=on_listening,
        lifespan=lifespan,
    )


class CertificateRefused(Exception):
    """A certificate or key that cannot be used; the message is for the operator.

    Not an `OSError`, as ssl raises it: those are errors of the address.
    """


def check_address(settings: ServerSettings) -> None:
    """Bind the address and release it; raises OSError when a server cannot listen.

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
        context.load_cert_chain(
            certificate, key, password=lambda: ""
        )  # a locked key fails instead of prompting
    except ssl.SSLError as exc:
        raise CertificateRefused(
            f"{certificate} and {key} are not a certificate and its private key: both must be PEM,"
            " and the key must not be encrypted"
        ) from exc
    except OSError as exc:
        raise CertificateRefused(f"{exc.filename} cannot be read: {exc.strerror}") from exc


def _check_socket(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise NotADirectoryError(f"{folder} is not a writable folder")
    if path.exists() and not path.is_socket():
        raise FileExistsError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return  # a stale socket, or none
    raise FileExistsError("another server is listening there")


class Server(uvicorn.Server):
    """Graceful shutdown: close admission, drain requests in flight, then close the sockets."""

    def __init__(
        self,
        config: uvicorn.Config,
        admission: AdmissionControl,
        drain_seconds: float,
        *,
        on_signal: OnSignal,
        on_listening: Callable[[str], None],
        lifespan: Lifespan,
    ) -> None:
        super().__init__(config)
        self._admission = admission
        self._drain_seconds = drain_seconds
        self._on_signal = on_signal
        self._on_listening = on_listening
        self._lifespan = lifespan

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, with the lifespan entered."""
        async with self._lifespan():
            await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to `on_signal`; the first signal starts the drain."""
        loop = asyncio.get_running_loop()
        draining: list[asyncio.Task[None]] = []

        def drain() -> None:
            draining.append(loop.create_task(self._drain()))

        with self._on_signal(lambda: loop.call_soon_threadsafe(drain)):
            yield

    async def on_tick(self, counter: int) -> bool:
        """Say whether to stop: at a shutdown, or because the engine has failed for good."""
        return await super().on_tick(counter) or self._admission.is_engine_lost

    async def _drain(self) -> None:
        self._admission.close()
        clock = asyncio.get_running_loop().time
        ends = clock() + self._drain_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._admission.wait_until_empty()
        # Uploads and downloads bypass admission control: they get the remaining time.
        self.config.timeout_graceful_shutdown = max(1, math.ceil(ends - clock()))
        self.should_exit = True

    def _log_started_message(self, listeners: object) -> None:
        del listeners
        if self.config.uds:
            self._on_listening(f"unix:{self.config.uds}")
            return
        [server, *_] = self.servers
        host, port, *_ = server.sockets[0].getsockname()
        scheme = "https" if self.config.is_ssl else "http"
        shown = f"[{host}]" if ":" in host else host
        self._on_listening(f"{scheme}://{shown}:{port}")


def raise_file_limit() -> None:
    """Raise the limit of open files to its hard limit, for many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS refuses its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
