"""Waiting reason of a batch: in its object, on the dashboard, and at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from openai.types import Batch as OpenAIBatch

from tests.emulators import MODEL, Emulator
from tests.handler.api.rig import answer_to, request_of, serving
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tidemill.batch.fleet import CircuitBreaker, FleetState
from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Operation
from tidemill.handler.control.advance import advance
from tidemill.handler.queries.batch_view import describe_batch

BREAKER = CircuitBreaker(1_800_000_000, "r1", "crash_loop", "They <die> of it.", "Mend it.")


@pytest.fixture
def mill(ministack: Emulator) -> Iterator[Cloud]:
    """Return a deployment with fleets, whose API is that of this process."""
    cloud = Cloud.on(ministack, fleets="/none")
    with serving(cloud) as cloud:
        yield cloud


def trip(cloud: Cloud, breaker: CircuitBreaker | None = BREAKER) -> None:
    """Open or close the circuit breaker of the model."""
    cloud.run(cloud.deployment.fleets.change(MODEL, lambda _: FleetState(breaker=breaker)))


def running(cloud: Cloud, name: str = "x") -> Batch:
    """Return a batch that waits for workers."""
    return cloud.ingest(cloud.create(lines_of(25), f"input/{name}.jsonl"))


def test_a_batch_shows_why_it_waits(mill: Cloud) -> None:
    """A running batch with an open breaker has it in addition to the fields of OpenAI's object."""
    batch = running(mill)

    def seen(batch: Batch) -> dict[str, object] | None:
        wire = mill.run(describe_batch(mill.deployment, batch, time.time())).model_dump(mode="json")
        OpenAIBatch.model_validate(wire)
        waiting: dict[str, object] | None = wire["tidemill"]["waiting"]
        return waiting

    assert seen(batch) is None
    trip(mill)
    assert seen(batch) == {
        "code": "crash_loop",
        "message": "They <die> of it. Mend it.",
        "since": BREAKER.at,
    }
    assert seen(replace(batch, status=Status.FINALIZING)) is None
    trip(mill, None)
    assert seen(batch) is None


def test_without_fleets_no_state_is_read(mill: Cloud) -> None:
    """A deployment without fleets pays for no read."""
    batch = running(mill)
    trip(mill)
    cloud = mill.having(fleets="")
    wire = cloud.run(describe_batch(cloud.deployment, batch, time.time()))
    assert wire.tidemill.waiting is None


def test_the_dashboard_shows_why_it_waits(mill: Cloud) -> None:
    """The batch's page and the list show it, as text."""
    batch = running(mill)
    trip(mill)
    for path, words in (
        (f"/dashboard/view/batches/{batch.id}", "They &lt;die&gt; of it. Mend it."),
        ("/dashboard/view/batches", "no worker: crash loop"),
    ):
        event = request_of(path)
        event["headers"].pop("accept-encoding")
        assert words in answer_to(event)["body"]


def test_a_batch_that_expires_under_an_open_breaker_has_the_reason(mill: Cloud) -> None:
    """Its errors and its report contain it; with a closed breaker the window is the only reason."""
    braked, free = running(mill, "a"), running(mill, "b")
    trip(mill)
    expire(mill, braked)
    trip(mill, None)
    expire(mill, free)
    errors = mill.batch(braked.id).errors
    assert [(error.code, error.message) for error in errors] == [
        ("crash_loop", "They <die> of it. Mend it.")
    ]
    assert mill.batch(free.id).errors == ()
    report = json.loads(mill.run(get(mill, mill.batch(braked.id))))
    assert report["status"] == "expired"
    assert report["errors"]["data"][0]["code"] == "crash_loop"
    assert report["tidemill"]["num_errors"] == 1


def expire(cloud: Cloud, batch: Batch) -> None:
    """Let the window of a batch end, and see it to its end."""
    later = batch.expires_at + 1
    while not cloud.batch(batch.id).is_terminal:
        advance(cloud.aws, cloud.deployment, batch.id, plenty, now=lambda: later)


def get(cloud: Cloud, batch: Batch) -> Operation[bytes]:
    """Return the report of a batch."""
    return cloud.deployment.bucket.get(batch.outputs.report_key)
