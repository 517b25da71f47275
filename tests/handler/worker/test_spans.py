"""Spans of a worker: a batch, its shards and a sample of their requests in one trace."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.handler.worker.fakes import FakeEngine
from tests.handler.worker.rig import Rig, until
from tidemill.net.otlp_tracing import OtlpTracing
from tidemill.net.tracing import Sample


async def test_shards_of_all_workers_are_in_the_trace_of_their_batch(rig: Rig) -> None:
    """The one that commits the last shard ends the batch's span."""
    exporters = InMemorySpanExporter(), InMemorySpanExporter()
    work = rig.batch(*[{"status": 400 if n == 5 else 200} for n in range(6)], shard_lines=2)
    first, second = (OtlpTracing(exporter, Sample()) for exporter in exporters)
    async with rig.worker(tracing=first), rig.worker(tracing=second):
        await until(lambda: work.is_done)
    first.close()
    second.close()
    spans: list[Any] = [span for each in exporters for span in each.get_finished_spans()]
    batch, *again = (span for span in spans if span.name == "batch")
    assert {span.context.span_id for span in again} <= {batch.context.span_id}
    shards = {span.context.span_id: span for span in spans if span.name == "shard"}
    requests = [span for span in spans if span.name == "x"]
    assert {span.context.trace_id for span in spans} == {batch.context.trace_id}
    assert {shard.parent.span_id for shard in shards.values()} == {batch.context.span_id}
    assert sorted(shard.attributes["tidemill.shard"] for shard in shards.values()) == [0, 1, 2]
    assert {shard.attributes["tidemill.outcome"] for shard in shards.values()} == {"committed"}
    assert {span.attributes["tidemill.batch.id"] for span in (batch, *shards.values())} == {work.id}
    assert len(requests) == 6
    assert {span.parent.span_id for span in requests} == set(shards)
    assert [span for span in requests if "error.type" in span.attributes] != []


async def test_a_span_shows_that_its_shard_is_given_back(rig: Rig) -> None:
    """Another worker's span continues."""
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing(exporter, Sample())
    work = rig.batch({"wait": 30})
    engine = FakeEngine()
    async with rig.worker(engine=engine, tracing=tracing):
        await until(lambda: engine.requests)
    tracing.close()
    spans: list[Any] = [*exporter.get_finished_spans()]
    [shard] = spans
    assert shard.attributes["tidemill.outcome"] == "released"
    assert not work.is_done
