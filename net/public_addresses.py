"""Public addresses: the only ones dialled on behalf of a client; nothing here resolves names.

`ipaddress.is_global` alone is not enough: it is true for the metadata address behind NAT64,
multicast, site-local addresses, and 168.63.129.16, where Azure's machines reach their host.
"""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, ip_address, ip_network

_NETWORKS = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
    "168.63.129.16/32 192.168.0.0/16 198.18.0.0/15 224.0.0.0/4 240.0.0.0/4 "
    # The unspecified address, loopback and IPv4 in IPv6 are all in ::/96 and ::ffff:0:0/96.
    "::/96 ::ffff:0:0/96 64:ff9b::/96 64:ff9b:1::/48 2002::/16 2001::/32 "
    "fc00::/7 fe80::/10 fec0::/10 ff00::/8"
)
_DENIED = tuple(map(ip_network, _NETWORKS.split()))
_UNICAST = ip_network("2000::/3")  # the allocated part of IPv6


def is_public_address(address: str) -> bool:
    """Say whether an address may be dialled on behalf of a client."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and (
        parsed.scope_id is not None or parsed not in _UNICAST  # ::ffff:0:0:0/96 and the like
    ):
        return False
    return parsed.is_global and not any(
        parsed in network for network in _DENIED if network.version == parsed.version
    )


def is_internal_host(host: str) -> bool:
    """Say whether a host is visibly not public; any other host has to be resolved.

    Addresses count in every form that resolvers accept: `127.1`, `0x7f000001`, `2130706433`.
    """
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if ":" in name:
        return not is_public_address(name)
    try:
        packed = socket.inet_aton(name)
    except (OSError, UnicodeError):
        return False
    return not is_public_address(socket.inet_ntoa(packed))
