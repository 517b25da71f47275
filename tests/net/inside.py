"""Addresses and hosts that are not public, for all tests of refused URLs."""

from __future__ import annotations

ADDRESSES = [
    "0.0.0.0",  # noqa: S104 - nothing is bound
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "168.63.129.16",
    "169.254.170.2",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:8.8.8.8",
    "::ffff:0:8.8.8.8",
    "4000::1",
    "::ffff:127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "2001::1",
    "2001:0:53aa:64c::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "2a00:1450::1%eth0",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
]

HOSTS = (
    "127.0.0.1 127.1 127.0.1 0x7f.1 0x7f000001 2130706433 017700000001 0 10.1 10.0.0.1 "
    "169.254.43518 169.254.169.254 0xa9fea9fe ::1 ::ffff:7f00:1 ::ffff:127.0.0.1 "
    "64:ff9b::a9fe:a9fe fd00:ec2::254"
).split()
"""Such addresses in every notation that a resolver reads."""

NAMES = "localhost LOCALHOST localhost. api.localhost 127.0.0.1.".split()
"""Names that a resolver may find at such addresses."""


def in_url(host: str) -> str:
    """Return a host as written in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
