"""Which hosts and addresses are public."""

from __future__ import annotations

import pytest

from engine.hosts.public import is_inside, is_public

INSIDE = [
    "0.0.0.0",  # noqa: S104 - nothing is bound
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
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
    "not an address",
    "",
]


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    """Loopback, private, link-local, multicast and IPv4 hidden in IPv6 are all refused."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2a00:1450:4001::1"]
)
def test_public_addresses_are_dialled(address: str) -> None:
    """Ordinary addresses of the internet pass."""
    assert is_public(address)


@pytest.mark.parametrize(
    "address", [address for address in INSIDE if "." in address or ":" in address]
)
def test_a_literal_inside_is_told_by_its_words(address: str) -> None:
    """Whatever form of IPv4 or IPv6 it has."""
    assert is_inside(address)


@pytest.mark.parametrize(
    "host",
    "localhost LOCALHOST localhost. api.localhost 127.1 127.0.1 0x7f.1 0x7f000001 2130706433 "
    "017700000001 0 10.1 169.254.43518 0xa9fea9fe 127.0.0.1. ::ffff:7f00:1".split(),
)
def test_other_words_for_what_is_inside_are_told_too(host: str) -> None:
    """As a resolver would take them, before anything is resolved."""
    assert is_inside(host)


@pytest.mark.parametrize(
    "host",
    [
        *"8.8.8.8 134744072 0x08080808 2a00:1450:4001::1 example.com 10.example.com".split(),
        *("localhost.example.com", "notlocalhost", "files", "x" * 300, ""),
    ],
)
def test_any_other_host_is_seen_when_it_is_resolved(host: str) -> None:
    """A name tells nothing, and a public address is one in any form."""
    assert not is_inside(host)
