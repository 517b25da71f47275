"""Server settings: address, TLS, keys, origins, limits and timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_BODY_BYTES = 36 * 2**20
"""Room for 25 MiB of audio in base64 and the rest of its JSON, as in a line of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server. Sizes are bytes, times seconds; no `api_keys` means open to all."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_queued_requests: int = 1024
    max_body_bytes: int = MAX_BODY_BYTES
    header_seconds: float = 10.0
    body_seconds: float = 300.0
    keep_alive_seconds: float = 75.0
    stall_seconds: float = 60.0
    comment_seconds: float = 15.0
    drain_seconds: float = 30.0
