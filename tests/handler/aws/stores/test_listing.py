"""A tenant's batches, page by page, through both drivers on each emulator."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from uuid import uuid4

import pytest

from tests.handler.aws.conftest import Run
from tests.handler.aws.given import NOW, make_batch
from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Call, Operation, T
from tidemill.handler.deployment import Deployment


def in_small_answers(operation: Operation[T]) -> Operation[T]:
    """Ask for one item at a time, as if DynamoDB's answers were full after each."""

    def small(call: Call) -> Call:
        arguments = {**call.arguments, "Limit": 1} if call.method == "query" else call.arguments
        return Call(call.service, call.method, arguments)

    stepped: Generator[Call, Any, T] = operation
    try:
        call = next(stepped)
        while True:
            call = stepped.send((yield small(call)))
    except StopIteration as stop:
        result: T = stop.value
        return result


@pytest.fixture
def tenant() -> str:
    """Return a tenant without batches."""
    return uuid4().hex


def add(run: Run, deployment: Deployment, tenant: str, *ages: int) -> list[Batch]:
    """Record batches with these ages in seconds; return them newest first."""
    made = [make_batch(deployment, tenant=tenant, created_at=NOW - age) for age in ages]
    for batch in made:
        run(deployment.table.create_batch(batch))
    return sorted(made, key=lambda batch: (batch.created_at, batch.id), reverse=True)


def test_batches_come_newest_first_and_of_one_tenant(
    run: Run, deployment: Deployment, tenant: str
) -> None:
    """Whole ones, as `get_batch` returns them; the order is by time, then by id."""
    made = add(run, deployment, tenant, 5, 0, 5, 10)
    add(run, deployment, f"{tenant}x", 3)
    assert run(deployment.table.list_batches(tenant, limit=10)) == (made, False)
    assert run(deployment.table.list_batches("unknown", limit=10)) == ([], False)


def test_batches_of_earlier_versions_keep_their_place(
    run: Run, deployment: Deployment, tenant: str
) -> None:
    """They have whole seconds alone, and come before the new batches of their second."""
    old = add(run, deployment, tenant, 0, 0, 1)
    new = [
        make_batch(deployment, tenant=tenant, created_at=NOW, created_ns=NOW * 10**9 + since)
        for since in (5, 0, 10**9)
    ]
    for batch in new:
        run(deployment.table.create_batch(batch))
    wanted = [new[2], new[0], new[1], *old]
    assert run(deployment.table.list_batches(tenant, limit=10)) == (wanted, False)
    for number, batch in enumerate(wanted):
        listing = deployment.table.list_batches(tenant, limit=10, after=batch)
        assert run(listing) == (wanted[number + 1 :], False)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_pages_join_without_a_gap(
    run: Run, deployment: Deployment, tenant: str, limit: int
) -> None:
    """More is promised if and only if there is more, however small DynamoDB's answers are."""
    made = add(run, deployment, tenant, 0, 1, 1, 2)
    found: list[Batch] = []
    has_more = True
    while has_more:
        last = found[-1] if found else None
        page, has_more = run(
            in_small_answers(deployment.table.list_batches(tenant, limit=limit, after=last))
        )
        assert page
        assert len(page) == limit or not has_more
        found += page
    assert found == made


def test_what_a_batch_becomes_is_listed_in_its_place(
    run: Run, deployment: Deployment, tenant: str
) -> None:
    """Its place is that of its creation, its fields are those it has now."""
    newer, older = add(run, deployment, tenant, 0, 1)
    moved = run(deployment.table.move_batch(older.id, Status.FAILED, NOW)).batch
    assert run(deployment.table.list_batches(tenant, limit=10)) == ([newer, moved], False)


def test_a_batch_of_another_tenant_moves_no_page(
    run: Run, deployment: Deployment, tenant: str
) -> None:
    """`after` is a place in time: what is listed is the tenant's own all the same."""
    older = add(run, deployment, tenant, 5, 0)[1]
    (theirs,) = add(run, deployment, f"{tenant}x", 3)
    page = run(deployment.table.list_batches(tenant, limit=10, after=theirs))
    assert page == ([older], False)
