"""Public and private hosts and addresses."""

from __future__ import annotations

import pytest

from tests.net.inside import ADDRESSES, HOSTS, NAMES
from tidemill.net.public_addresses import is_internal_host, is_public_address


@pytest.mark.parametrize("address", [*ADDRESSES, "not an address", ""])
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    """Loopback, private, link-local, multicast and IPv4 hidden in IPv6 are all refused."""
    assert not is_public_address(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2a00:1450:4001::1"]
)
def test_public_addresses_are_dialled(address: str) -> None:
    """Ordinary internet addresses are public."""
    assert is_public_address(address)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_literal_private_address_is_internal(address: str) -> None:
    """Any notation of IPv4 and IPv6 is recognised."""
    assert is_internal_host(address)


@pytest.mark.parametrize("host", [*HOSTS, *NAMES])
def test_other_internal_hosts_are_recognised(host: str) -> None:
    """Every form that resolvers accept is recognised, before anything is resolved."""
    assert is_internal_host(host)


@pytest.mark.parametrize(
    "host",
    [
        *"8.8.8.8 134744072 0x08080808 2a00:1450:4001::1 example.com 10.example.com".split(),
        *("localhost.example.com", "notlocalhost", "files", "x" * 300, ""),
    ],
)
def test_other_hosts_are_judged_after_resolution(host: str) -> None:
    """A name alone shows nothing, and a public address is public in any form."""
    assert not is_internal_host(host)
