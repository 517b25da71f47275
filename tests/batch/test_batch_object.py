"""The Batch object: all of OpenAI's fields, and null for unknown values."""

from __future__ import annotations

from dataclasses import replace

from openai.types import Batch as OpenAIBatch

from tests.batch.test_states import NEW
from tidemill.batch.batch_object import batch_object, cost_of
from tidemill.batch.file.unknown_parameters import UnknownParameter
from tidemill.batch.model import BatchError, EngineInfo, Options
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

PROGRESS = Progress(7, 3, 70, 20, 21, gpu_seconds=1800.0)


def test_every_field_of_the_sdk_is_there() -> None:
    """A field added by the SDK's next version fails this test."""
    wire = batch_object(NEW, Progress(), now=0).model_dump(mode="json")
    assert set(OpenAIBatch.model_fields) <= set(wire)
    OpenAIBatch.model_validate(wire)
    known = {name for name, value in wire.items() if value is not None}
    assert {"id", "status", "endpoint", "created_at", "request_counts", "usage"} <= known
    assert wire["output_file_id"] is wire["errors"] is wire["metadata"] is None


def test_truncated_rows_are_not_in_the_counts_of_the_sdk() -> None:
    """They are completed rows, so the three counts still add up."""
    wire = batch_object(NEW, Progress(7, 3, truncated=2), now=0).model_dump(mode="json")
    OpenAIBatch.model_validate(wire)
    assert (wire["request_counts"]["completed"], wire["request_counts"]["failed"]) == (7, 3)
    assert wire["tidemill"]["truncated_rows"] == 2


def test_an_ended_batch_is_complete() -> None:
    """It has counts, tokens, errors with their lines, and the final sums once they exist."""
    batch = replace(
        NEW,
        status=Status.FAILED,
        errors=(BatchError("invalid_json_line", "no", None, 3),),
        options=Options(metadata={"team": "search"}),
        num_rows=11,
        final=PROGRESS,
    )
    wire = batch_object(batch, Progress(1), now=0).model_dump(mode="json")
    parsed = OpenAIBatch.model_validate(wire)
    assert wire["request_counts"] == {"total": 11, "completed": 7, "failed": 3}
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 91
    assert parsed.usage.input_tokens_details.cached_tokens == 20
    assert parsed.errors is not None
    assert parsed.errors.data is not None
    assert parsed.errors.data[0].line == 3
    assert parsed.metadata == {"team": "search"}


def test_an_ended_batch_has_its_mean_rates() -> None:
    """They are over the seconds in which rows ran; a running batch has recent ones.

    A batch that never ran has none.
    """
    running = replace(NEW, status=Status.IN_PROGRESS, in_progress_at=100)
    progress = replace(PROGRESS, rows_per_second=9.0, audio_seconds=40.0)
    ended = replace(running, status=Status.COMPLETED, completed_at=120, final=progress)
    final = replace(progress, reused=5, first_row_at=110.5, last_row_at=111.0)
    quick = replace(ended, final=final)
    never_ran = replace(NEW, status=Status.FAILED, failed_at=120)
    names = ("rows", "tokens", "input_tokens", "audio_seconds")
    for batch, rates in (
        (running, [9.0, 0.0, 0.0, 0.0]),
        (ended, [0.5, 1.05, 3.5, 2.0]),
        (quick, [10.0, 42.0, 140.0, 80.0]),
        (never_ran, [0.0] * 4),
    ):
        wire = batch_object(batch, progress, now=110).model_dump(mode="json")["tidemill"]
        assert [wire[f"{name}_per_second"] for name in names] == rates


def test_the_cost_is_a_field_of_tidemill() -> None:
    """Half an hour of a GPU at 4 per hour is 2; without a price there is no cost."""
    batch = replace(
        NEW,
        status=Status.COMPLETED,
        in_progress_at=100,
        completed_at=160,
        engine=EngineInfo("r1", "1.2", labels_spans=True),
    )
    beyond = batch_object(batch, PROGRESS, now=999, price_per_gpu_hour=4.0).tidemill
    assert beyond.seconds == 60
    assert beyond.gpu_seconds == 1800.0
    assert beyond.cost == 2.0
    assert (beyond.model_revision, beyond.engine_version) == ("r1", "1.2")
    assert beyond.labels_spans
    assert cost_of(PROGRESS.gpu_seconds, None) is None


def test_a_running_batch_has_an_estimated_end() -> None:
    """It is the rest at the present rate, rounded up; without a rate it is null."""
    batch = replace(NEW, status=Status.IN_PROGRESS, in_progress_at=100, num_rows=31)
    running = replace(PROGRESS, rows_per_second=2.0, tokens_per_second=40.0)
    beyond = batch_object(batch, running, now=150.2).tidemill
    assert (beyond.seconds, beyond.rows_per_second, beyond.tokens_per_second) == (50, 2.0, 40.0)
    assert beyond.eta_at == 161  # 21 rows: 10.5 s
    assert batch_object(batch, PROGRESS, now=150).tidemill.eta_at is None
    assert batch_object(replace(batch, num_rows=10), running, now=150).tidemill.eta_at is None


def test_an_ended_batch_has_no_rate() -> None:
    """The last rates of its shards do not matter."""
    batch = replace(NEW, status=Status.CANCELLING, num_rows=31)
    running = replace(PROGRESS, rows_per_second=2.0, tokens_per_second=40.0)
    beyond = batch_object(batch, running, now=150).tidemill
    assert (beyond.rows_per_second, beyond.tokens_per_second, beyond.eta_at) == (0, 0, None)


def test_lists_show_fewer_errors_and_their_total() -> None:
    """A response with many batches is limited."""
    errors = tuple(BatchError("invalid_json_line", "no", None, line) for line in range(100))
    batch = replace(NEW, status=Status.FAILED, errors=errors, num_errors=7000)
    wire = batch_object(batch, Progress(), now=0, max_errors=5)
    assert wire.errors is not None
    assert [error.line for error in wire.errors.data] == [0, 1, 2, 3, 4]
    assert wire.tidemill.num_errors == 7000


def test_unknown_parameters_are_listed_and_fewer_in_lists() -> None:
    """An erased batch has none, because the names come from the client."""
    unknown = tuple(UnknownParameter(f"p{n}", "/v1/embeddings", 2, 1, None) for n in range(20))
    batch = replace(NEW, unknown_parameters=unknown)
    assert len(batch_object(batch, Progress(), now=0).tidemill.unknown_parameters) == 20
    [listed] = batch_object(batch, Progress(), now=0, max_errors=1).tidemill.unknown_parameters
    assert (listed.name, listed.count, listed.suggestion) == ("p0", 2, None)
    erased = replace(batch, erasing_at=5)
    assert batch_object(erased, Progress(), now=9).tidemill.unknown_parameters == []
