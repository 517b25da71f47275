"""Server address and API key, from `--base-url` and the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.offline.console.errors import Refused
from tidemill.offline.console.terminal import log

BASE_URL = "TIDEMILL_BASE_URL"
API_KEY = "TIDEMILL_API_KEY"
_VERSION = "/v1"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Server:
    """Base URL of an API, without `/v1`, and its key; an empty key means none."""

    url: str
    key: str = field(repr=False)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags shared by all commands of the API."""
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help=f"set the API's base URL (default: {BASE_URL}); the API key is read from {API_KEY}",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print only JSON on standard output, one value per line",
    )


def server_of(base_url: str | None, environment: Mapping[str, str] | None = None) -> Server:
    """Return the server from the flag or the environment; raises Refused.

    OPENAI_API_KEY and OPENAI_BASE_URL are ignored: a key must never reach another server.
    """
    environment = os.environ if environment is None else environment
    url = (base_url if base_url is not None else environment.get(BASE_URL, "")).strip()
    if not url:
        raise Refused(
            f"no server is set: set {BASE_URL} to the API's base URL, or pass --base-url "
            "(`tidemill serve`, `tidemill local up` and the stack's output ApiUrl print it)"
        )
    key = _checked_key(environment.get(API_KEY, "").strip())
    return Server(_checked_url(url, has_key=bool(key)), key)


def _checked_url(url: str, *, has_key: bool) -> str:
    from urllib.parse import urlsplit

    shown = url.rpartition("@")[2]
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as exc:
        raise Refused(f"the URL {shown} in {BASE_URL} or --base-url is not valid: {exc}") from exc
    if parts.scheme not in {"http", "https"} or not host:
        raise Refused(
            f"the URL {shown} must start with https:// or http:// and contain a host name"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise Refused(f"the URL {shown} must not contain a user name, query or fragment")
    if has_key and parts.scheme == "http" and host not in _LOOPBACK:
        log(f"warning: {shown} is not encrypted: anyone on the network path can read the key")
    return url.rstrip("/").removesuffix(_VERSION).rstrip("/")


def _checked_key(key: str) -> str:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise Refused(
            f"{API_KEY} does not contain a valid API key: it has spaces or unprintable characters"
        )
    return key
