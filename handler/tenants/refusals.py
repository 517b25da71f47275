"""Refusals without a table read: of keys refused before, and of addresses that try many.

The limits apply to one process; a Lambda has as many processes as concurrent requests.
"""

from __future__ import annotations

from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from threading import Lock
from typing import Final, TypeVar

from .limits import LimitReached

REFUSALS_A_MINUTE: Final = 30
# Unknown keys that may be right are looked up beyond the first limit.
LOOKED_UP_REFUSALS_A_MINUTE: Final = 300
RIGHT_SECONDS: Final = 3600
_MINUTE_SECONDS: Final = 60
MAX_REMEMBERED: Final = 10_000
# The prefix of an IPv6 site; a host may use any number of addresses in it.
_SITE_BITS: Final = 64

Key = TypeVar("Key")
Value = TypeVar("Value")


class Refusals:
    """Keys refused within a minute, also by address, and keys accepted within an hour.

    An accepted key is looked up in the table at each request, whatever its address has tried. An
    unknown key is looked up until its address has had many more refusals: only then can attackers
    at that address make it wait for the next minute.
    """

    def __init__(self) -> None:
        self._refused: dict[bytes, None] = {}
        self._right_until: dict[bytes, float] = {}
        self._by_site: dict[str, int] = {}
        self._minute = 0
        self._changing = Lock()

    def is_known(self, token: str, address: str, now: float, *, is_well_formed: bool) -> bool:
        """Return whether a token was refused before, and count it; raises LimitReached by address.

        These limits are for refusals: a tenant's requests have separate limits.
        """
        with self._changing:
            self._forget(now)
            digest, site = _digest(token), _site(address)
            if now < self._right_until.get(digest, 0.0):
                return False
            is_refused = digest in self._refused
            may_be_right = is_well_formed and not is_refused
            limit = LOOKED_UP_REFUSALS_A_MINUTE if may_be_right else REFUSALS_A_MINUTE
            if self._by_site.get(site, 0) >= limit:
                raise LimitReached(
                    "Too many requests with invalid keys from this address.",
                    retry_after_seconds=_MINUTE_SECONDS - int(now) % _MINUTE_SECONDS,
                )
            if is_refused:
                _put(self._by_site, site, self._by_site.get(site, 0) + 1)
            return is_refused

    def note(self, token: str, address: str, now: float, *, is_right: bool) -> None:
        """Record the verdict on a token; a refusal counts for its address."""
        with self._changing:
            self._forget(now)
            digest, site = _digest(token), _site(address)
            self._right_until.pop(digest, None)
            if is_right:
                _put(self._right_until, digest, now + RIGHT_SECONDS)
            else:
                _put(self._refused, digest, None)
                _put(self._by_site, site, self._by_site.get(site, 0) + 1)

    def _forget(self, now: float) -> None:
        minute = int(now) // _MINUTE_SECONDS
        if minute != self._minute:
            self._minute = minute
            self._refused.clear()
            self._by_site.clear()


def _put(found: dict[Key, Value], key: Key, value: Value) -> None:
    """Set a value; the oldest is removed if there are too many."""
    if key not in found and len(found) >= MAX_REMEMBERED:
        del found[next(iter(found))]
    found[key] = value


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()


def _site(address: str) -> str:
    """Return an address, or the 64-bit network of an IPv6 address."""
    try:
        found = ip_address(address)
    except ValueError:
        return ""
    if not isinstance(found, IPv6Address) or found.ipv4_mapped:
        return address
    return f"{int(found) >> _SITE_BITS:x}"
