"""Tenant limits, and the errors when they are reached."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Operation
from tidemill.handler.aws.stores.usage import DAY_SECONDS
from tidemill.handler.settings import Limits
from tidemill.handler.tenants.limits import LimitReached
from tidemill.handler.tenants.tenants import KnownTenants

# Ten seconds before midnight (UTC): counts of days long past have expired.
LATE = int(time.time()) // DAY_SECONDS * DAY_SECONDS + DAY_SECONDS - 10


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a separate deployment on each emulator in turn."""
    return Cloud.on(emulator)


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a deployment on one emulator, for what is not about AWS."""
    return Cloud.on(ministack)


def limited(cloud: Cloud, **limits: int) -> Cloud:
    """Return the cloud as a process sees it that has just begun, with limits for everybody."""
    return cloud.having(limits=Limits(**limits))


def refusal(cloud: Cloud, operation: Operation[Any]) -> LimitReached:
    """Return with what an operation is refused."""
    with pytest.raises(LimitReached) as caught:
        cloud.run(operation)
    return caught.value


def used(cloud: Cloud, tenant: str) -> list[dict[str, Any]]:
    """Return what is counted of a tenant."""
    return cloud.run(cloud.deployment.usage.query(f"USAGE#{tenant}", "DAY#"))


def test_requests_are_admitted_up_to_the_limit_of_a_day(cloud: Cloud) -> None:
    """The next one waits for midnight, and another tenant for nothing."""
    cloud = limited(cloud, requests_per_day=2)
    for _ in range(2):
        cloud.run(cloud.deployment.limits.admit_request("ads", LATE))
    error = refusal(cloud, cloud.deployment.limits.admit_request("ads", LATE))
    assert error.retry_after_seconds == 10
    assert "2 requests per day" in error.message
    cloud.run(cloud.deployment.limits.admit_request("search", LATE))
    cloud.run(cloud.deployment.limits.admit_request("ads", LATE + 10))
    assert [day["requests"] for day in used(cloud, "ads")] == [2, 1]


def test_requests_are_admitted_up_to_the_limit_of_a_minute(cloud: Cloud) -> None:
    """The next one waits for the next minute, another tenant for nothing, and the day counts on."""
    cloud = limited(cloud, requests_per_minute=2, requests_per_day=3)
    for _ in range(2):
        cloud.run(cloud.deployment.limits.admit_request("ads", LATE - 15))
    error = refusal(cloud, cloud.deployment.limits.admit_request("ads", LATE - 15))
    assert error.retry_after_seconds == 25
    assert "2 requests per minute" in error.message
    cloud.run(cloud.deployment.limits.admit_request("search", LATE - 15))
    cloud.run(cloud.deployment.limits.admit_request("ads", LATE - 75))
    error = refusal(cloud, cloud.deployment.limits.admit_request("ads", LATE - 75))
    assert "3 requests per day" in error.message


def test_what_is_refused_is_not_counted(cloud: Cloud) -> None:
    """A large upload that did not fit leaves room for a small one."""
    cloud = limited(cloud, bytes_per_day=100)
    cloud.run(cloud.deployment.limits.admit_bytes("ads", 60, LATE))
    error = refusal(cloud, cloud.deployment.limits.admit_bytes("ads", 41, LATE))
    assert "41 bytes would exceed the limit of 100" in error.message
    refusal(cloud, cloud.deployment.limits.admit_bytes("new", 101, LATE))
    cloud.run(cloud.deployment.limits.admit_bytes("ads", 40, LATE))
    assert [day["bytes"] for day in used(cloud, "ads")] == [100]
    assert used(cloud, "new") == []


def test_the_limit_holds_however_many_come_at_once(mini: Cloud) -> None:
    """Twenty at the same moment: as many as there is room for are let in."""
    cloud = limited(mini, requests_per_day=7)

    def is_admitted(_: int) -> bool:
        try:
            cloud.run(cloud.deployment.limits.admit_request("ads", LATE))
        except LimitReached:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(is_admitted, range(20))) == 7


def test_nothing_is_written_without_a_limit(mini: Cloud) -> None:
    """A tenant without limits costs no writes."""
    batch = mini.create(lines_of(3))
    for operation in (
        mini.deployment.limits.admit_request("default", LATE),
        mini.deployment.limits.admit_bytes("default", 10**12, LATE),
        mini.deployment.limits.admit_batch("default", LATE),
        mini.deployment.limits.queue_lines(batch, 3),
    ):
        assert mini.run(operation) is None
    assert used(mini, "default") == []
    assert mini.run(mini.deployment.usage.count_lines("default")) == 0
    assert mini.batch(batch.id).queued_lines is None


def test_a_tenants_own_limit_counts_more_than_everybodys(mini: Cloud) -> None:
    """A larger one, and none at all by 0."""
    cloud = limited(mini, requests_per_day=1)
    cloud.run(cloud.deployment.tenants.change("more", requests_per_day=2))
    cloud.run(cloud.deployment.tenants.change("free", requests_per_day=0))
    for tenant, admitted in (("more", 2), ("free", 5)):
        for _ in range(admitted):
            cloud.run(cloud.deployment.limits.admit_request(tenant, LATE))
    refusal(cloud, cloud.deployment.limits.admit_request("more", LATE))


def test_a_tenant_is_read_once_a_minute(mini: Cloud) -> None:
    """A changed setting applies within a minute."""
    store, reads = mini.deployment.tenants, 0
    known = KnownTenants(store)

    def found(now: float) -> int | None:
        nonlocal reads
        operation = known.find("ads", now)
        try:
            call = next(operation)
        except StopIteration as stop:
            return stop.value.requests_per_day
        reads += 1
        with pytest.raises(StopIteration) as stopped:
            operation.send(mini.aws._send(call))
        return stopped.value.value.requests_per_day

    assert found(100.0) is None
    mini.run(store.change("ads", requests_per_day=5))
    assert (found(159.0), reads) == (None, 1)
    assert (found(160.0), reads) == (5, 2)
    assert (found(159.1), reads) == (5, 2)  # a caller with whole seconds
    assert (found(150.0), reads) == (5, 3)  # a clock that was set back


def test_the_tenants_that_are_remembered_are_a_bounded_number(mini: Cloud) -> None:
    """The one that was read first is forgotten first."""
    known = KnownTenants(mini.deployment.tenants)
    for number in range(1001):
        operation = known.find(f"t{number}", 1.0)
        next(operation)
        with pytest.raises(StopIteration):
            operation.send({})
    assert len(known._known) == 1000
    assert "t0" not in known._known


def test_lines_are_counted_until_their_batch_ends(cloud: Cloud) -> None:
    """A file beyond the limit fails; the API accepts no batch when it is reached."""
    cloud = limited(cloud, queued_lines=10)
    deployment = cloud.deployment
    first, second, third = (cloud.create(lines_of(1), key=f"input/{name}.jsonl") for name in "abc")
    assert cloud.run(deployment.limits.queue_lines(first, 6)) is None
    cloud.run(deployment.limits.admit_batch("default", LATE))
    error = cloud.run(deployment.limits.queue_lines(second, 5))
    assert error is not None
    assert error.code == "queued_lines_exceeded"
    assert "limit of 10" in error.message
    assert cloud.run(deployment.limits.queue_lines(third, 4)) is None
    refused = refusal(cloud, deployment.limits.admit_batch("default", LATE))
    assert refused.retry_after_seconds == 60
    cloud.run(deployment.limits.admit_batch("search", LATE))
    cloud.run(deployment.usage.release_lines(cloud.batch(first.id)))
    assert cloud.run(deployment.usage.count_lines("default")) == 4
    assert cloud.run(deployment.limits.queue_lines(second, 5)) is None


def test_a_limit_that_is_set_before_a_drop_holds_for_it(mini: Cloud) -> None:
    """A drop's creation reads the tenant again, whatever the process has cached."""
    mini.run(mini.deployment.limits.admit_batch("default", time.time()))
    mini.run(mini.deployment.tenants.change("default", queued_lines=2))
    batch = mini.ingest(mini.create(lines_of(3)))
    assert [error.code for error in batch.errors] == ["queued_lines_exceeded"]


def test_lines_are_counted_and_given_back_once(cloud: Cloud) -> None:
    """A run that dies in between repeats it with the same result."""
    cloud = limited(cloud, queued_lines=10)
    usage, batch = cloud.deployment.usage, cloud.create(lines_of(1))
    for _ in range(2):
        assert cloud.run(cloud.deployment.limits.queue_lines(batch, 6)) is None
    assert cloud.run(usage.count_lines("default")) == 6
    counted = cloud.batch(batch.id)
    for _ in range(2):
        cloud.run(usage.release_lines(counted))
    assert cloud.run(usage.count_lines("default")) == 0
    assert cloud.batch(batch.id).queued_lines is None


def test_lines_of_a_batch_that_has_ended_are_not_counted(mini: Cloud) -> None:
    """They would never be given back."""
    cloud = limited(mini, queued_lines=10)
    batch = cloud.create(lines_of(1))
    cloud.run(cloud.deployment.table.move_batch(batch.id, Status.FAILED, LATE))
    cloud.run(cloud.deployment.limits.queue_lines(batch, 6))
    assert cloud.run(cloud.deployment.usage.count_lines("default")) == 0
