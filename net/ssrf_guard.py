"""SSRF guard: checks a client's url, and resolves its host once to pinned addresses."""

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
# No white space, no backslash, nothing beyond ASCII: what parsers disagree about.
_URL = re.compile(r"[!-\[\]-~]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


class UrlRefused(Exception):
    """A url that must not be spoken to; the message says why and does not hold the url."""

    code: str = "url_refused"


class ParsedUrl(NamedTuple):
    """The parts of a url; `path` includes the query."""

    scheme: Scheme
    host: str
    port: int
    path: str


class Target(NamedTuple):
    """A checked url: `path` with its query, and the public addresses of `host`."""

    scheme: Scheme
    host: str
    port: int
    path: str
    addresses: tuple[str, ...]


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raises OSError when it has none, or they do not come."""
    answer: Future[list[Any]] = Future()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
            answer.set_exception(exc)

    # It cannot be broken off: a thread that waits for a name server longer is left to itself.
    Thread(target=ask, daemon=True).start()
    try:
        found = answer.result(_RESOLVE_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"no address after {_RESOLVE_SECONDS:g} s") from None
    return [str(address[0]) for *_, address in found]


def resolve_target(
    url: str,
    resolve: Resolve = resolve,
    *,
    schemes: Sequence[Scheme] = ("https",),
    allowed: Collection[str] | None = None,
) -> Target:
    """Return where to dial for a url; raises UrlRefused, and OSError from `resolve`.

    `allowed` are the hosts that it may name, None for any.
    """
    told = parse_url(url, schemes)
    if allowed is not None and told.host.lower() not in allowed:
        raise UrlRefused(f"{told.host} is none of the hosts that may be named")
    try:
        addresses = tuple(dict.fromkeys(resolve(told.host, told.port)))
    except UnicodeError as exc:  # an empty label, or one of more than 63 characters
        raise UrlRefused("the url names no host") from exc
    if not addresses or not all(map(is_public_address, addresses)):
        raise UrlRefused(f"{told.host} is not a public host")
    return Target(*told, addresses)


def parse_url(url: str, schemes: Sequence[Scheme]) -> ParsedUrl:
    """Return what a url says that all parsers read alike; raises UrlRefused for any other."""
    if not _URL.fullmatch(url):
        raise UrlRefused("the url holds characters that no url may hold")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise UrlRefused("the url cannot be read") from exc
    scheme = next((each for each in schemes if each == parts.scheme), None)
    if scheme is None:
        raise UrlRefused(f"the url must begin with {' or '.join(f'{each}://' for each in schemes)}")
    if "@" in parts.netloc:
        raise UrlRefused("the url must not hold a user name or password")
    host = parts.netloc if port is None else parts.netloc.removesuffix(f":{port}")
    if not _HOST.fullmatch(host) or port == 0:
        raise UrlRefused("the url names no host")
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    return ParsedUrl(scheme, host.strip("[]"), port or PORTS[scheme], path)


def redact_url(text: str, url: str) -> str:
    """Return words without what stands behind the host of a url and is long enough to be secret."""
    parts = re.split("[/?&=]", url)[3:]
    for part in sorted(parts, key=len, reverse=True):
        for secret in (part, unquote(part)):
            if len(secret) >= _MIN_SECRET_CHARS:
                text = text.replace(secret, "…")
    return text
