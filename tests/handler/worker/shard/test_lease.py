"""A worker's view of its lease, and operations that stop when the lease ends."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.handler.aws.calls import Call, Operation
from tidemill.handler.errors import ConditionFailed, LeaseLost
from tidemill.handler.worker.shard.lease import Lease, guarded


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_a_lease_ends_after_the_last_renewal_was_sent() -> None:
    """The time of the reply does not count; a renewal that is answered late takes nothing away."""
    clock = Clock()
    lease = Lease(30, 100, clock)
    clock.now = 129.9
    lease.check()
    lease.renewed(115)
    lease.renewed(105)
    clock.now = 144.9
    assert not lease.is_over
    clock.now = 145
    assert lease.is_over
    with pytest.raises(LeaseLost):
        lease.check()


def test_a_lease_is_due_long_before_it_ends() -> None:
    """It is due after a third, so that two renewals may fail."""
    clock = Clock()
    lease = Lease(30, 100, clock)
    clock.now = 109.9
    assert not lease.is_due
    clock.now = 110
    assert lease.is_due


def test_a_lease_that_another_has_is_over() -> None:
    """No renewal that was under way brings it back."""
    lease = Lease(30, 100, Clock())
    lease.end()
    lease.renewed(100)
    assert lease.is_over


def three_calls() -> Operation[list[Any]]:
    """Make three calls; the second may fail."""
    found = [(yield Call("s3", "first", {}))]
    try:
        found.append((yield Call("s3", "second", {})))
    except ConditionFailed:
        found.append("refused")
    found.append((yield Call("s3", "third", {})))
    return found


def test_a_guarded_operation_does_as_it_would() -> None:
    """Answers and failures reach it, its result comes out."""
    operation = guarded(three_calls(), lambda: None)
    assert next(operation).method == "first"
    assert operation.send(1).method == "second"
    assert operation.throw(ConditionFailed("no")).method == "third"
    with pytest.raises(StopIteration) as stop:
        operation.send(3)
    assert stop.value.value == [1, "refused", 3]


def test_a_guarded_operation_makes_no_call_after_the_lease() -> None:
    """Its progress does not matter."""
    clock = Clock()
    operation = guarded(three_calls(), Lease(30, 100, clock).check)
    assert next(operation).method == "first"
    clock.now = 130
    with pytest.raises(LeaseLost):
        operation.send(1)
