"""SSRF guard: checks a client's URL and resolves its host once, to pinned addresses."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from .public_addresses import is_public_address

Resolve = Callable[[str, int], list[str]]
Scheme = Literal["https", "http"]

PORTS: Mapping[Scheme, int] = MappingProxyType({"https": 443, "http": 80})

_MIN_SECRET_CHARS = 12
_RESOLVE_SECONDS = 10.0
# No whitespace, backslashes or non-ASCII characters: parsers disagree about them.
_URL = re.compile(r"[!-\[\]-~]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


class UrlRefused(Exception):
    """A URL that must not be fetched; the message does not contain the URL."""

    code: str = "url_refused"


class ParsedUrl(NamedTuple):
    """The parts of a URL; `path` includes the query."""

    scheme: Scheme
    host: str
    port: int
    path: str


class Target(NamedTuple):
    """A checked URL: `path` with its query, and the public addresses of `host`."""

    scheme: Scheme
    host: str
    port: int
    path: str
    addresses: tuple[str, ...]


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raises OSError if it has none or the lookup times out."""
    answer: Future[list[Any]] = Future()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as exc:  # noqa: BLE001 - raised again by `answer.result`
            answer.set_exception(exc)

    # A lookup cannot be cancelled: after the timeout its thread is abandoned.
    Thread(target=ask, daemon=True).start()
    try:
        infos = answer.result(_RESOLVE_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"no DNS answer within {_RESOLVE_SECONDS:g} s") from None
    return [str(address[0]) for *_, address in infos]


def resolve_target(
    url: str,
    resolve: Resolve = resolve,
    *,
    schemes: Sequence[Scheme] = ("https",),
    allowed: Collection[str] | None = None,
) -> Target:
    """Return the target of a URL; raises UrlRefused, and OSError from `resolve`.

    `allowed` lists the allowed hosts; None allows any.
    """
    parsed = parse_url(url, schemes)
    if allowed is not None and parsed.host.lower() not in allowed:
        raise UrlRefused(f"{parsed.host} is not an allowed host")
    try:
        addresses = tuple(dict.fromkeys(resolve(parsed.host, parsed.port)))
    except UnicodeError as exc:  # an empty label, or one of more than 63 characters
        raise UrlRefused("the URL has no valid host") from exc
    if not addresses or not all(map(is_public_address, addresses)):
        raise UrlRefused(f"{parsed.host} is not a public host")
    return Target(*parsed, addresses)


def parse_url(url: str, schemes: Sequence[Scheme]) -> ParsedUrl:
    """Parse a URL; raises UrlRefused for one that other parsers may read differently."""
    if not _URL.fullmatch(url):
        raise UrlRefused("the URL contains invalid characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise UrlRefused("the URL is not valid") from exc
    scheme = next((each for each in schemes if each == parts.scheme), None)
    if scheme is None:
        raise UrlRefused(f"the URL must start with {' or '.join(f'{each}://' for each in schemes)}")
    if "@" in parts.netloc:
        raise UrlRefused("the URL must not contain a user name or password")
    host = parts.netloc if port is None else parts.netloc.removesuffix(f":{port}")
    if not _HOST.fullmatch(host) or port == 0:
        raise UrlRefused("the URL has no valid host")
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    return ParsedUrl(scheme, host.strip("[]"), port or PORTS[scheme], path)


def redact_url(text: str, url: str) -> str:
    """Return a text without parts of a URL's path and query that may be secret."""
    parts = re.split("[/?&=]", url)[3:]
    for part in sorted(parts, key=len, reverse=True):
        for secret in (part, unquote(part)):
            if len(secret) >= _MIN_SECRET_CHARS:
                text = text.replace(secret, "…")
    return text
