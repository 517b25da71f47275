"""Cross-site requests and DNS rebinding, both refused by a server without keys.

A browser posts for any page, to the machine it runs on too, and names the page in `Origin`. A page
whose name its owner points at this machine is no stranger to the browser; `Host` has that name.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope

from engine.protocol.validation import printable
from server.bodies import header
from server.errors import Refused
from server.settings import ServerSettings

_ANY = "*"
_MAX_SHOWN_CHARS = 200
# Nobody can have a name below these, or one without a dot, in the public DNS.
_PRIVATE = (".localhost", ".local", ".internal")


class Origins:
    """Refuses cross-site requests where there are no keys: with keys, no page knows one.

    A server at a loopback address, or one that was told its names, is asked by these names alone,
    by addresses, and by names that the public DNS cannot have.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._is_open = bool(settings.api_keys)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        own = settings.host.lower()
        self._hosts = frozenset([own, *map(_name_of, settings.allowed_hosts)])
        # A server that others reach has names that nobody told it, unless they were.
        is_local = settings.uds is None and _is_loopback(own)
        self._checks_hosts = bool(settings.allowed_hosts) or is_local

    def refused(self, scope: Scope) -> Refused | None:
        """Return the refusal of a request that a foreign page may have sent, or None."""
        if self._is_open:
            return None
        host, origin = _name_of(header(scope, b"host") or ""), header(scope, b"origin")
        if self._checks_hosts and not self._is_ours(host):
            return _refused(
                f"This server is not known as {_shown(host)}: name it by --allowed-hosts, or let in"
                " only who has a key, by --api-key.",
                "host_not_allowed",
            )
        if origin is not None and not self._may_ask(origin.lower(), host):
            return _refused(
                f"Pages of {_shown(origin)} may not ask this server: name them by"
                " --allowed-origins, or let in only who has a key, by --api-key.",
                "origin_not_allowed",
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """Say whether a name cannot be one that a stranger points here."""
        is_private = "." not in host or host.endswith(_PRIVATE)
        return is_private or _is_address(host) or _is_in(host, self._hosts)

    def _may_ask(self, origin: str, host: str) -> bool:
        """Say whether a page is one of this machine, one of this server's own, or was named."""
        if _is_in(origin, self._origins):
            return True
        page = _host_of(origin)
        if not page:  # `null`: a file, or a frame that hides whose it is
            return False
        return _is_loopback(page) or (page == host and self._is_ours(host))


def _is_in(name: str, names: Collection[str]) -> bool:
    return name in names or _ANY in names


def _name_of(host: str) -> str:
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


def _shown(name: str) -> str:
    return printable(name, _MAX_SHOWN_CHARS) or "nothing"


def _refused(words: str, code: str) -> Refused:
    return Refused(words, status_code=403, code=code, type="permission_error")
