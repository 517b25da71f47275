"""Origin check: a server without keys refuses cross-site requests and DNS rebinding.

A browser lets any page post to the machine it runs on, and names the page in `Origin`. If a page's
DNS name is pointed at this machine, the browser considers it same-origin; `Host` has that name.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from tidemill.protocol.validation import printable

from .errors import Refused
from .request_bodies import header
from .settings import ServerSettings

_ANY = "*"
_MAX_SHOWN_CHARS = 200
# The public DNS has no names under these, and none without a dot.
_PRIVATE = (".localhost", ".local", ".internal")


class OriginCheck:
    """Refuses cross-site requests when there are no keys; a foreign page knows no key.

    A server at a loopback address, or one with `allowed_hosts`, accepts only its own names, IP
    addresses, and names that the public DNS cannot have.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._is_open = bool(settings.api_keys)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        own = settings.host.lower()
        self._hosts = frozenset([own, *map(_host_name, settings.allowed_hosts)])
        # The names of a public server are unknown unless they were configured.
        is_local = settings.uds is None and _is_loopback(own)
        self._checks_hosts = bool(settings.allowed_hosts) or is_local

    def check(self, scope: Scope) -> Refused | None:
        """Return the 403 for a request that a foreign page may have sent, or None."""
        if self._is_open:
            return None
        host, origin = _host_name(header(scope, b"host") or ""), header(scope, b"origin")
        if self._checks_hosts and not self._is_own_host(host):
            return _error(
                f"The host {_printable(host)} is not allowed: add it with --allowed-hosts, or"
                " require a key with --api-key.",
                "host_not_allowed",
            )
        if origin is not None and not self._is_allowed_origin(origin.lower(), host):
            return _error(
                f"The origin {_printable(origin)} is not allowed: add it with"
                " --allowed-origins, or require a key with --api-key.",
                "origin_not_allowed",
            )
        return None

    def _is_own_host(self, host: str) -> bool:
        """Say whether a host name cannot be a stranger's that points here."""
        is_private = "." not in host or host.endswith(_PRIVATE)
        return is_private or _is_address(host) or _is_in(host, self._hosts)

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        """Say whether an origin is local, the server's own, or allowed by name."""
        if _is_in(origin, self._origins):
            return True
        page = _host_of(origin)
        if not page:  # `null`: a file, or a sandboxed frame
            return False
        return _is_loopback(page) or (page == host and self._is_own_host(host))


def _is_in(name: str, names: Collection[str]) -> bool:
    return name in names or _ANY in names


def _host_name(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    return _host_of(f"//{host}")


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return _is_address(host) and ip_address(host).is_loopback


def _printable(name: str) -> str:
    return printable(name, _MAX_SHOWN_CHARS) or "nothing"


def _error(words: str, code: str) -> Refused:
    return Refused(words, status_code=403, code=code, type="permission_error")
