"""Forecast of a running batch, from the tokens that its lines are expected to take.

If all long lines are at the end, a rate of rows would give too early an end.
"""

from __future__ import annotations

from .file.expected_tokens import ExpectedTokens, work_of
from .file.throughput import TELLING_SHARE, seconds_left
from .fleet import WorkerRate
from .model import Batch
from .progress_counts import Progress


def tokens_left(batch: Batch, done: Progress) -> ExpectedTokens:
    """Return the remaining tokens, extrapolated from finished rows."""
    left = batch.expected - done.expected
    return ExpectedTokens(
        _scaled(left.input, done.prompt_tokens, done.expected.input),
        _scaled(left.output, done.completion_tokens, done.expected.output),
    )


def share_done(batch: Batch, done: Progress) -> float:
    """Return the finished share of a batch's work; by rows if no tokens are known."""
    if work := _work_done(done):
        return work / (work + tokens_left(batch, done).work)
    return done.num_rows / max(1, batch.num_rows)


def batch_seconds_left(batch: Batch, done: Progress, seconds: float) -> float | None:
    """Return the seconds until all rows are finished, after this many seconds of running.

    Returns None while unknown, and once all rows are finished.
    """
    share, share_per_second = share_done(batch, done), done.rows_per_second / max(1, batch.num_rows)
    if work := _work_done(done):
        rate = work_of(done.input_tokens_per_second, done.tokens_per_second)
        share_per_second = share * rate / work
    return seconds_left(share, seconds, share_per_second)


def estimate_gpu_seconds(batch: Batch, done: Progress, rate: WorkerRate) -> float | None:
    """Return the estimated GPU seconds of the whole batch; None while unknown.

    The estimate uses the batch's own rows, or before them the rate of its model's workers.
    """
    share = share_done(batch, done)
    if share >= TELLING_SHARE and done.gpu_seconds:
        return done.gpu_seconds / share
    if not rate.expected_work_per_second or not rate.num_gpus or not batch.expected.work:
        return None
    return batch.expected.work / rate.expected_work_per_second * rate.num_gpus


def _work_done(done: Progress) -> float:
    """Return the cost of finished rows in tokens; 0 if nothing was expected of them."""
    return work_of(done.prompt_tokens, done.completion_tokens) if done.expected.work else 0.0


def _scaled(left: int, done: int, expected: int) -> int:
    return round(left * done / expected) if expected else left
