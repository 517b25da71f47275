"""How a batch is looked at while it runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tidemill.cli.api.objects import Batch
from tidemill.cli.batches.follow import batch_progress, follow, poll_delays, rates


def test_looks_become_rarer() -> None:
    """From one second to ten, and never more."""
    delays = poll_delays()
    found = [next(delays) for _ in range(20)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert found[-1] == 10.0


def test_a_batch_that_moves_is_polled_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls become rarer while its counts stay, although its seconds go on."""
    counts = [0, 0, 1, 2, 2, 2, 3]
    batches = [
        Batch(
            {
                "id": "batch_1",
                "status": "in_progress" if count < 3 else "completed",
                "request_counts": {"total": 3, "completed": count, "failed": 0},
                "tidemill": {"seconds": number},
            }
        )
        for number, count in enumerate(counts)
    ]
    pauses: list[float] = []
    monkeypatch.setattr("tidemill.offline.console.backoff.sleep", pauses.append)
    coming = iter(batches[1:])
    client = SimpleNamespace(batch=lambda *_, **__: next(coming))
    shown: list[Batch] = []
    assert follow(client, batches[0], shown.append) == batches[-1]  # type: ignore[arg-type]
    assert shown == batches
    assert pauses == [1.0, 1.5, 2.0, 2.0, 3.0, 4.5]


def test_the_expected_end_stays_while_no_row_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time left counts down until the next row, and then is estimated again."""
    now = 1_000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("tidemill.cli.batches.follow.time.time", lambda: now)
    monkeypatch.setattr("tidemill.offline.console.backoff.sleep", sleep)

    def batch(completed: int) -> Batch:
        counts = {"total": 3, "completed": completed, "failed": 0}
        fields = {"eta_at": None if completed in {0, 3} else now + 3.0, "seconds": now}
        status = "completed" if completed == 3 else "in_progress"
        return Batch({"status": status, "request_counts": counts, "tidemill": fields, "id": "b"})

    counts, shown = iter([1, 1, 1, 1, 2, 3]), list[list[str]]()
    client = SimpleNamespace(batch=lambda *_, **__: batch(next(counts)))
    follow(client, batch(0), lambda each: shown.append(rates(each.fields)[-1:]))  # type: ignore[arg-type]
    assert shown == [[], ["3 s left"], ["1 s left"], [], [], ["3 s left"], []]


def test_a_waiting_batch_shows_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """A model may take minutes to load, which must not look like a hang."""
    counts = {"total": 4, "completed": 0, "failed": 0}
    loading = "no rows yet: a worker is starting and loading the model"
    with batch_progress() as show:
        show(Batch({"status": "validating", "request_counts": dict.fromkeys(counts, 0)}))
        show(Batch({"status": "in_progress", "request_counts": counts}))
        show(Batch({"status": "finalizing", "request_counts": counts | {"completed": 4}}))
    assert capsys.readouterr().err.splitlines() == [
        "tidemill: validating, its file is being read",
        f"tidemill: in_progress, 0 of 4 rows, {loading}",
        "tidemill: finalizing, 4 of 4 rows, its results are being joined",
    ]


def test_a_batch_with_rows_shows_only_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is shown as by `status`."""
    counts = {"total": 4, "completed": 1, "failed": 1}
    with batch_progress() as show:
        fields = {"rows_per_second": 2.0, "tokens_per_second": 30.0}
        show(Batch({"status": "in_progress", "request_counts": counts, "tidemill": fields}))
    assert capsys.readouterr().err == (
        "tidemill: in_progress, 2 of 4 rows, 1 failed, 2.0 rows/s, 30 tokens/s\n"
    )


def test_a_batch_without_workers_shows_the_reason_immediately(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A worker that does not start is not announced, and the reason is not delayed."""
    fields = {"status": "in_progress", "request_counts": {"total": 4, "completed": 1, "failed": 0}}
    waiting = {"code": "crash_loop", "message": "They die.", "since": 7}
    with batch_progress() as show:
        show(Batch(fields))
        show(Batch(fields | {"tidemill": {"waiting": waiting}}))
    assert capsys.readouterr().err.splitlines() == [
        "tidemill: in_progress, 1 of 4 rows",
        "tidemill: in_progress, 1 of 4 rows, They die.",
    ]
