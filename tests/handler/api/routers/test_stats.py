"""`/v1/stats` and `/metrics`: a tenant's figures, and the dashboard that is made for them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.emulators import MODEL, Emulator
from tests.handler.api.rig import answer_to, request_of, serving
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.model import Batch
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.handler.api.routers.exposition import expose
from tidemill.handler.lifecycle.announce import announce
from tidemill.handler.queries.stats import tenant_stats

DASHBOARD = Path(__file__).parents[4] / "docs" / "grafana" / "tidemill.json"
DOCS = Path(__file__).parents[4] / "docs" / "reference" / "api.md"
HALF_DONE = Progress(6, 1, 70, 20, 30, 1800.0, 0.5, 8.0, 90.0, 40.0, 2.5)


@pytest.fixture
def cloud(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Return a separate deployment on each emulator, with a price."""
    prices = json.dumps({MODEL: 4.0})
    monkeypatch.setenv("TIDEMILL_GPU_HOUR_PRICES", prices)
    with serving(Cloud.on(emulator, shard_lines="10", gpu_hour_prices=prices)) as cloud:
        yield cloud


def running(cloud: Cloud, name: str) -> Batch:
    """Return a batch of 25 lines, of which one of three shards is half done."""
    batch = cloud.ingest(cloud.create(lines_of(25), f"input/{name}.jsonl"))
    table, until = cloud.deployment.table, time.time() + 600
    cloud.run(table.renew(cloud.claim(batch.id), lease_until=until, progress=HALF_DONE, attempts=1))
    return batch


def ended(cloud: Cloud, tenant: str, status: Status, final: Progress) -> None:
    """Let a batch come to its end."""
    batch = cloud.create(lines_of(1), f"input/{tenant}-{status}.jsonl")
    moves = [Status.FAILED] if status is Status.FAILED else [Status.IN_PROGRESS, Status.FINALIZING]
    for move in moves if status is Status.FAILED else [*moves, status]:
        fields = {"final": vars_of(final), "tenant": tenant, "model": MODEL}
        cloud.run(cloud.deployment.table.move_batch(batch.id, move, 9, **fields))
    for _ in range(2):
        cloud.run(announce(cloud.deployment, cloud.batch(batch.id)))


def vars_of(progress: Progress) -> dict[str, Any]:
    """Return the fields of a progress."""
    return {name: getattr(progress, name) for name in Progress.__dataclass_fields__}


def stats() -> dict[str, Any]:
    """Return the reply to the tenant `default`."""
    answer = answer_to(request_of("/v1/stats"))
    assert answer["statusCode"] == 200, answer["body"]
    found: dict[str, Any] = json.loads(answer["body"])
    return found


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the samples of a scrape by name and label."""
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_active_work_is_reported(cloud: Cloud, client: OpenAI) -> None:
    """Waiting rows and shards, rates, tokens and cost are summed over all batches of the tenant."""
    del client
    running(cloud, "a")
    running(cloud, "b")
    cloud.create(lines_of(3), "input/c.jsonl")
    active = stats()["active"]
    assert active["batches"] == {
        "validating": 1,
        "in_progress": 2,
        "cancelling": 0,
        "finalizing": 0,
    }
    assert (active["rows_waiting"], active["rows_completed"], active["rows_failed"]) == (36, 12, 2)
    assert (active["shards_waiting"], active["shards_running"]) == (4, 2)
    assert (active["rows_per_second"], active["tokens_per_second"]) == (1.0, 16.0)
    assert active["input_tokens_per_second"] == 80.0
    assert (active["audio_seconds_per_second"], active["audio_seconds"]) == (5.0, 180.0)
    assert (active["completion_tokens"], active["gpu_seconds"], active["cost"]) == (60, 3600.0, 4.0)


def test_what_has_ended_is_counted_once(cloud: Cloud, client: OpenAI) -> None:
    """Ends are counted by status, even if reported repeatedly; another tenant's are not."""
    del client
    done = Progress(5, 2, 50, 10, 20, 900.0, audio_seconds=60.5)
    ended(cloud, "default", Status.COMPLETED, done)
    ended(cloud, "default", Status.FAILED, Progress())
    ended(cloud, "others", Status.COMPLETED, Progress(100, 0, 100, 0, 100, 900.0))
    found = stats()["ended"]
    assert found == {
        "batches": {"cancelled": 0, "completed": 1, "expired": 0, "failed": 1},
        "rows_completed": 5,
        "rows_failed": 2,
        "rows_reused": 0,
        "rows_truncated": 0,
        "prompt_tokens": 50,
        "cached_tokens": 10,
        "completion_tokens": 20,
        "audio_seconds": 60.5,
        "gpu_seconds": 900.0,
        "cost": 1.0,
    }
    assert stats()["active"]["batches"]["in_progress"] == 0


def test_prometheus_reads_the_same(cloud: Cloud, client: OpenAI) -> None:
    """The format and the content type are Prometheus's own."""
    del client
    running(cloud, "a")
    ended(cloud, "default", Status.COMPLETED, Progress(5, 2, 50, 10, 20, 900.0))
    answer = answer_to(request_of("/metrics"))
    assert answer["statusCode"] == 200
    assert answer["headers"]["Content-Type"].startswith("text/plain; version=0.0.4")
    found = samples(answer["body"])
    assert found["tidemill_active_batches", "in_progress"] == 1
    assert found["tidemill_waiting_rows", ""] == 18
    assert found["tidemill_rows_per_second", ""] == 0.5
    assert found["tidemill_active_cost", ""] == 2.0
    assert found["tidemill_active_audio_seconds", ""] == 90.0
    assert found["tidemill_audio_per_second", ""] == 2.5
    assert found["tidemill_ended_batches_total", "completed"] == 1
    assert found["tidemill_ended_rows_total", "failed"] == 2
    assert found["tidemill_ended_tokens_total", "completion"] == 20
    assert found["tidemill_ended_cost_total", ""] == 1.0


def test_without_prices_costs_are_absent(cloud: Cloud, client: OpenAI) -> None:
    """The cost is not zero either."""
    del client
    found = tenant_stats(cloud.aws, cloud.having(gpu_hour_prices={}).deployment, "default", 0)
    assert (found.active.cost, found.ended.cost) == (None, None)
    assert "cost" not in expose(found)


def test_more_batches_than_are_looked_into_still_wait(
    cloud: Cloud, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All their lines and shards count as waiting, because their progress is not read."""
    del client
    monkeypatch.setattr("tidemill.handler.queries.stats.MAX_SURVEYED", 1)
    running(cloud, "a")
    running(cloud, "b")
    active = stats()["active"]
    assert (active["rows_waiting"], active["shards_waiting"]) == (18 + 25, 2 + 3)
    assert active["batches"]["in_progress"] == 2


def names_in(expression: str) -> set[str]:
    """Return the metrics of ours that an expression names."""
    return set(re.findall(r"\btidemill_[a-z_]+\b", expression))


def test_the_dashboard_shows_metrics_that_there_are(cloud: Cloud, client: OpenAI) -> None:
    """Every expression names a metric, and all metrics are shown in a panel and in the docs."""
    del cloud, client
    exposed = {name for name, _ in samples(answer_to(request_of("/metrics"))["body"])}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) >= 10
    assert all(names_in(expression) for expression in expressions)
    shown = set().union(*map(names_in, expressions))
    assert shown - exposed == set()
    assert exposed - shown == set()
    page = DOCS.read_text(encoding="utf-8")
    assert [name for name in sorted(exposed) if name not in page] == []


def test_the_dashboards_panels_do_not_overlap() -> None:
    """No panel overlaps another, and each has a title and a unique number."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
