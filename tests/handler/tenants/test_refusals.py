"""Refusals of one process: by token and by address, for a minute, in bounded memory."""

from __future__ import annotations

import pytest

from tidemill.handler.tenants.limits import LimitReached
from tidemill.handler.tenants.refusals import MAX_REMEMBERED, REFUSALS_A_MINUTE, Refusals

NOW = 60_000_000
HERE, THERE = "192.0.2.1", "192.0.2.2"


def exhaust(refusals: Refusals, address: str) -> None:
    """Refuse as many tokens from an address as it may try."""
    for number in range(REFUSALS_A_MINUTE):
        refusals.note(f"{address}-{number}", address, NOW, is_right=False)


def is_stopped(refusals: Refusals, address: str, now: float = NOW, token: str = "new") -> bool:
    """Say whether an address has to wait."""
    try:
        refusals.is_known(token, address, now)
    except LimitReached:
        return True
    return False


def test_a_token_is_refused_again_for_the_rest_of_its_minute() -> None:
    """The next minute asks the table again; a token that nobody tried is asked for, too."""
    refusals = Refusals()
    refusals.note("wrong", HERE, NOW, is_right=False)
    assert refusals.is_known("wrong", THERE, NOW + 59)
    assert not refusals.is_known("other", THERE, NOW + 59)
    assert not refusals.is_known("wrong", THERE, NOW + 60)


def test_a_token_that_was_let_in_is_asked_for_until_it_is_refused() -> None:
    """A key that is revoked meanwhile is refused as any other."""
    refusals = Refusals()
    refusals.note("key", HERE, NOW, is_right=True)
    exhaust(refusals, HERE)
    assert not refusals.is_known("key", HERE, NOW)
    refusals.note("key", HERE, NOW, is_right=False)
    assert refusals.is_known("key", THERE, NOW)


def test_an_address_waits_for_the_next_minute() -> None:
    """And is told how long that is; what it repeats counts as well."""
    refusals = Refusals()
    refusals.note("wrong", HERE, NOW, is_right=False)
    for _ in range(REFUSALS_A_MINUTE - 1):
        assert refusals.is_known("wrong", HERE, NOW)
    with pytest.raises(LimitReached) as stopped:
        refusals.is_known("wrong", HERE, NOW + 20)
    assert stopped.value.retry_after_seconds == 40
    assert not is_stopped(refusals, HERE, NOW + 60)


@pytest.mark.parametrize(
    ("tried", "asked", "stopped"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("", "unknown", True),
    ],
)
def test_addresses_of_one_site_are_one(tried: str, asked: str, *, stopped: bool) -> None:
    """A site of IPv6 has 64 bits; what is no address is one site."""
    refusals = Refusals()
    exhaust(refusals, tried)
    assert is_stopped(refusals, asked) == stopped


def test_memory_is_bounded() -> None:
    """The oldest is forgotten first, of tokens and of addresses."""
    refusals = Refusals()
    exhaust(refusals, HERE)
    for number in range(MAX_REMEMBERED):
        refusals.note(str(number), f"10.0.{number >> 8}.{number & 255}", NOW, is_right=False)
    assert not is_stopped(refusals, HERE)
    assert not refusals.is_known(f"{HERE}-0", "10.1.0.0", NOW)
    assert refusals.is_known("0", "10.1.0.0", NOW)
