"""Refusals of one process: by token and by address, in bounded memory."""

from __future__ import annotations

import pytest

from tidemill.handler.tenants.limits import LimitReached
from tidemill.handler.tenants.refusals import (
    LOOKED_UP_REFUSALS_A_MINUTE,
    MAX_REMEMBERED,
    REFUSALS_A_MINUTE,
    RIGHT_SECONDS,
    Refusals,
)

NOW = 60_000_000
HERE, THERE = "192.0.2.1", "192.0.2.2"


def exhaust(refusals: Refusals, address: str, now: float = NOW, limit: int = 0) -> None:
    """Refuse as many tokens from an address as it may try."""
    for number in range(limit or REFUSALS_A_MINUTE):
        refusals.note(f"{address}-{number}", address, now, is_right=False)


def is_known(refusals: Refusals, token: str, address: str, now: float = NOW) -> bool:
    """Say whether a token of the right form was refused before."""
    return refusals.is_known(token, address, now, is_well_formed=True)


def is_stopped(
    refusals: Refusals,
    address: str,
    now: float = NOW,
    token: str = "new",
    *,
    is_well_formed: bool = False,
) -> bool:
    """Say whether an address has to wait."""
    try:
        refusals.is_known(token, address, now, is_well_formed=is_well_formed)
    except LimitReached:
        return True
    return False


def test_a_token_is_refused_again_for_the_rest_of_its_minute() -> None:
    """The table is read again in the next minute, and for a token that was not tried before."""
    refusals = Refusals()
    refusals.note("wrong", HERE, NOW, is_right=False)
    assert is_known(refusals, "wrong", THERE, NOW + 59)
    assert not is_known(refusals, "other", THERE, NOW + 59)
    assert not is_known(refusals, "wrong", THERE, NOW + 60)


def test_an_accepted_token_is_read_until_it_is_refused() -> None:
    """A key that is revoked in the meantime is refused like any other."""
    refusals = Refusals()
    refusals.note("key", HERE, NOW, is_right=True)
    exhaust(refusals, HERE, limit=LOOKED_UP_REFUSALS_A_MINUTE)
    assert not is_known(refusals, "key", HERE)
    refusals.note("key", HERE, NOW, is_right=False)
    assert is_known(refusals, "key", THERE)


def test_a_key_that_was_let_in_is_not_locked_out_for_an_hour() -> None:
    """Attacks from its address cannot lock it out; each use begins another hour."""
    refusals = Refusals()
    for begin in (NOW, NOW + RIGHT_SECONDS - 60):
        refusals.note("key", HERE, begin, is_right=True)
        for later, stopped in ((RIGHT_SECONDS - 1, False), (RIGHT_SECONDS, True)):
            exhaust(refusals, HERE, begin + later, LOOKED_UP_REFUSALS_A_MINUTE)
            at = begin + later
            assert is_stopped(refusals, HERE, at, "key", is_well_formed=True) == stopped


def test_a_key_that_may_be_right_is_looked_up_for_longer() -> None:
    """A malformed or refused token is stopped at once."""
    refusals = Refusals()
    exhaust(refusals, HERE)
    assert is_stopped(refusals, HERE)
    assert is_stopped(refusals, HERE, token=f"{HERE}-0", is_well_formed=True)
    assert not is_stopped(refusals, HERE, is_well_formed=True)
    exhaust(refusals, HERE, limit=LOOKED_UP_REFUSALS_A_MINUTE - REFUSALS_A_MINUTE)
    assert is_stopped(refusals, HERE, is_well_formed=True)
    assert not is_stopped(refusals, HERE, NOW + 60)


def test_an_address_waits_for_the_next_minute() -> None:
    """The error gives the time; repeated requests count as well."""
    refusals = Refusals()
    refusals.note("wrong", HERE, NOW, is_right=False)
    for _ in range(REFUSALS_A_MINUTE - 1):
        assert is_known(refusals, "wrong", HERE)
    with pytest.raises(LimitReached) as stopped:
        is_known(refusals, "wrong", HERE, NOW + 20)
    assert stopped.value.retry_after_seconds == 40
    assert not is_stopped(refusals, HERE, NOW + 60)


@pytest.mark.parametrize(
    ("tried", "address", "stopped"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("", "unknown", True),
    ],
)
def test_addresses_of_one_site_are_one(tried: str, address: str, *, stopped: bool) -> None:
    """An IPv6 site has 64 bits; all invalid addresses are one site."""
    refusals = Refusals()
    exhaust(refusals, tried)
    assert is_stopped(refusals, address) == stopped


def test_memory_is_bounded() -> None:
    """The oldest is forgotten first, of tokens and of addresses."""
    refusals = Refusals()
    exhaust(refusals, HERE)
    for number in range(MAX_REMEMBERED):
        refusals.note(str(number), f"10.0.{number >> 8}.{number & 255}", NOW, is_right=False)
    assert not is_stopped(refusals, HERE)
    assert not is_known(refusals, f"{HERE}-0", "10.1.0.0")
    assert is_known(refusals, "0", "10.1.0.0")
    for number in range(MAX_REMEMBERED + 1):
        refusals.note(f"right-{number}", HERE, NOW, is_right=True)
    exhaust(refusals, HERE, limit=LOOKED_UP_REFUSALS_A_MINUTE)
    stopped = [is_stopped(refusals, HERE, token=f"right-{number}") for number in (0, 1)]
    assert stopped == [True, False]
