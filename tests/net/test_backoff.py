"""Delays between attempts, and the retry loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import pytest

from tidemill.net.backoff import (
    exponential_delay,
    exponential_delays,
    retry,
    retry_after,
    retry_async,
    with_jitter,
)

Retry = Callable[..., str]


class Busy(Exception):
    """A temporary failure, unless it `stays`."""

    def __init__(self, *, stays: bool = False) -> None:
        self.stays = stays


class Attempts:
    """Fails with each of the errors in turn, then succeeds."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self._errors = iter(errors)

    def __call__(self) -> str:
        """Fail or succeed."""
        for error in self._errors:
            raise error
        return "done"


def in_loop(attempt: Callable[[], str], *arguments: object, **options: object) -> str:
    """Run `retry_async` in a new event loop."""

    async def attempt_async() -> str:
        return attempt()

    run: Callable[..., Awaitable[str]] = retry_async

    async def run_all() -> str:
        return await run(attempt_async, *arguments, **options)

    return asyncio.run(run_all())


@pytest.fixture(params=[retry, in_loop], ids=["sync", "async"])
def retrying(request: pytest.FixtureRequest) -> Retry:
    """Return each of the two retry loops."""
    found: Retry = request.param
    return found


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the delays, and skip the sleeping."""
    delays: list[float] = []

    async def note(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr("tidemill.net.backoff.time.sleep", delays.append)
    monkeypatch.setattr("tidemill.net.backoff.asyncio.sleep", note)
    return delays


def test_delays_grow_up_to_a_limit() -> None:
    """A high retry number does not overflow."""
    assert list(islice(exponential_delays(0.5), 4)) == [0.5, 1.0, 2.0, 4.0]
    assert list(islice(exponential_delays(2.0, factor=4.0, most=10.0), 3)) == [2.0, 8.0, 10.0]
    assert exponential_delay(0, 5.0, most=1.0) == 1.0
    assert exponential_delay(10_000, 1.0, most=30.0) == 30.0


def test_jitter_is_half_of_the_delay_at_most() -> None:
    """Callers that collide wait for different times."""
    delays = {with_jitter(2.0) for _ in range(100)}
    assert len(delays) > 1
    assert 1.0 <= min(delays) <= max(delays) <= 3.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0", 0.0), ("-1", None), ("inf", None), ("nan", None), ("soon", None)],
)
def test_only_a_number_of_seconds_is_a_delay(value: str, seconds: float | None) -> None:
    """Dates are not supported, and neither is a missing header."""
    assert retry_after({"Retry-After": value}) == seconds
    assert retry_after({}) is None


def test_an_attempt_is_repeated_after_each_delay(retrying: Retry, slept: list[float]) -> None:
    """Each failure before the result is reported with the delay that follows it."""
    errors, seen = [Busy(), Busy()], list[tuple[Exception, float]]()
    notify = lambda exc, delay: seen.append((exc, delay))  # noqa: E731
    assert retrying(Attempts(errors), (1.0, 2.0, 4.0), Busy, notify=notify) == "done"
    assert slept == [1.0, 2.0]
    assert seen == list(zip(errors, slept, strict=True))


def test_the_last_error_is_raised_without_a_delay(retrying: Retry, slept: list[float]) -> None:
    """The caller does not wait when no attempt follows."""
    errors = [Busy(), Busy(), Busy()]
    with pytest.raises(Busy) as caught:
        retrying(Attempts(errors), (1.0,), Busy)
    assert caught.value is errors[1]
    assert slept == [1.0]


def test_other_errors_are_raised_at_once(retrying: Retry, slept: list[float]) -> None:
    """Other classes, and errors that the caller rejects, are not retried."""
    with pytest.raises(ValueError, match="other"):
        retrying(Attempts([ValueError("other")]), (1.0,), Busy)
    with pytest.raises(Busy):
        retrying(Attempts([Busy(stays=True)]), (1.0,), Busy, lambda exc: not exc.stays)
    assert slept == []
