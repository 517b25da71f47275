"""Refusals without a read of the table: of keys refused before, and of addresses that try many."""

from __future__ import annotations

from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from threading import Lock
from typing import Final, TypeVar

from .limits import LimitReached

# Of one process; a Lambda has as many as there are requests at a time.
REFUSALS_A_MINUTE: Final = 30
_MINUTE_SECONDS: Final = 60
MAX_REMEMBERED: Final = 10_000
# What a site gets; a host takes as many addresses in it as it likes.
_SITE_BITS: Final = 64

Key = TypeVar("Key")
Value = TypeVar("Value")


class Refusals:
    """The keys that a process has refused or let in, and refusals by address, in a minute.

    A key that was let in is looked up in the table at each request, whatever its address has tried:
    nobody is locked out by others who send from the same address.
    """

    def __init__(self) -> None:
        self._is_right: dict[bytes, bool] = {}
        self._by_site: dict[str, int] = {}
        self._minute = 0
        self._changing = Lock()

    def is_known(self, token: str, address: str, now: float) -> bool:
        """Say whether a token was refused before, which counts; raises LimitReached by address.

        The limit is one of refusals: requests of a tenant have limits of their own.
        """
        with self._changing:
            self._forget(now)
            is_right = self._is_right.get(_digest(token))
            if is_right:
                return False
            site = _site(address)
            if self._by_site.get(site, 0) >= REFUSALS_A_MINUTE:
                raise LimitReached(
                    "Too many requests with wrong keys came from this address.",
                    retry_after_seconds=_MINUTE_SECONDS - int(now) % _MINUTE_SECONDS,
                )
            if is_right is None:
                return False
            _put(self._by_site, site, self._by_site.get(site, 0) + 1)
            return True

    def note(self, token: str, address: str, now: float, *, is_right: bool) -> None:
        """Remember the verdict on a token; a refusal counts for its address."""
        with self._changing:
            self._forget(now)
            _put(self._is_right, _digest(token), is_right)
            if not is_right:
                site = _site(address)
                _put(self._by_site, site, self._by_site.get(site, 0) + 1)

    def _forget(self, now: float) -> None:
        minute = int(now) // _MINUTE_SECONDS
        if minute != self._minute:
            self._minute = minute
            self._is_right.clear()
            self._by_site.clear()


def _put(found: dict[Key, Value], key: Key, value: Value) -> None:
    """Set a value; where there are too many the oldest goes."""
    if key not in found and len(found) >= MAX_REMEMBERED:
        del found[next(iter(found))]
    found[key] = value


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()


def _site(address: str) -> str:
    """Return an address, or the network of 64 bits that an address of IPv6 is in."""
    try:
        found = ip_address(address)
    except ValueError:
        return ""
    if not isinstance(found, IPv6Address) or found.ipv4_mapped:
        return address
    return f"{int(found) >> _SITE_BITS:x}"
