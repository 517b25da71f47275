"""The Batch object: OpenAI's, whole, and null where nothing is known."""

from __future__ import annotations

from dataclasses import replace

from openai.types import Batch as OpenAIBatch

from handler.batch.model import BatchError, EngineInfo, Options, Progress
from handler.batch.states import Status
from handler.batch.wire import price_of, to_report, to_wire
from tests.handler.batch.test_states import NEW

PROGRESS = Progress(7, 3, 70, 20, 21, gpu_seconds=1800.0)


def test_every_field_of_the_sdk_is_there() -> None:
    """A field that the SDK's next version adds fails here."""
    wire = to_wire(NEW, Progress())
    assert set(OpenAIBatch.model_fields) <= set(wire)
    OpenAIBatch.model_validate(wire)
    known = {name for name, value in wire.items() if value is not None}
    assert {"id", "status", "endpoint", "created_at", "request_counts", "usage"} <= known
    assert wire["output_file_id"] is wire["errors"] is wire["metadata"] is None


def test_a_batch_that_has_ended_tells_all() -> None:
    """Counts, tokens, errors with their lines, and the final sums once there are some."""
    batch = replace(
        NEW,
        status=Status.FAILED,
        errors=(BatchError("invalid_json_line", "no", None, 3),),
        options=Options(metadata={"team": "search"}),
        num_rows=11,
        final=PROGRESS,
    )
    wire = to_wire(batch, Progress(1))
    parsed = OpenAIBatch.model_validate(wire)
    assert wire["request_counts"] == {"total": 11, "completed": 7, "failed": 3}
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 91
    assert parsed.usage.input_tokens_details.cached_tokens == 20
    assert parsed.errors is not None
    assert parsed.errors.data is not None
    assert parsed.errors.data[0].line == 3
    assert parsed.metadata == {"team": "search"}


def test_the_report_says_what_it_cost() -> None:
    """Half an hour of a GPU at 4 an hour is 2; without a rate there is no price."""
    batch = replace(NEW, in_progress_at=100, engine=EngineInfo("r1", "1.2"))
    report = to_report(batch, PROGRESS, now=160, price_per_gpu_hour=4.0)["tidemill"]
    assert report["seconds"] == 60
    assert report["gpu_seconds"] == 1800.0
    assert report["price"] == 2.0
    assert (report["model_revision"], report["engine_version"]) == ("r1", "1.2")
    assert price_of(PROGRESS, None) is None
