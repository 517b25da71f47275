"""Forecast of a batch in progress, by the tokens that its lines were expected to take.

Long lines may all come at the end, where a rate of rows would foretell too early an end.
"""

from __future__ import annotations

from .file.expected_tokens import ExpectedTokens, work_of
from .file.throughput import TELLING_SHARE, seconds_left
from .fleet import WorkerRate
from .model import Batch, Progress


def tokens_left(batch: Batch, done: Progress) -> ExpectedTokens:
    """Return the tokens that are left, by what those of finished rows came to."""
    left = batch.expected - done.expected
    return ExpectedTokens(
        _scaled(left.input, done.prompt_tokens, done.expected.input),
        _scaled(left.output, done.completion_tokens, done.expected.output),
    )


def share_done(batch: Batch, done: Progress) -> float:
    """Return the share of a batch's work that is done; by rows where no tokens are known."""
    if work := _work_done(done):
        return work / (work + tokens_left(batch, done).work)
    return done.num_rows / max(1, batch.num_rows)


def batch_seconds_left(batch: Batch, done: Progress, seconds: float) -> float | None:
    """Return when the rest of the rows would be there at the present rate, after so many seconds.

    None while nobody can know, and once all are there.
    """
    share, share_per_second = share_done(batch, done), done.rows_per_second / max(1, batch.num_rows)
    if work := _work_done(done):
        rate = work_of(done.input_tokens_per_second, done.tokens_per_second)
        share_per_second = share * rate / work
    return seconds_left(share, seconds, share_per_second)


def estimate_gpu_seconds(batch: Batch, done: Progress, rate: WorkerRate) -> float | None:
    """Return the GPU seconds that the whole batch will have taken; None while nobody can know.

    Its own rows tell it, or before them what its model's workers have measured.
    """
    share = share_done(batch, done)
    if share >= TELLING_SHARE and done.gpu_seconds:
        return done.gpu_seconds / share
    if not rate.expected_work_per_second or not rate.num_gpus or not batch.expected.work:
        return None
    return batch.expected.work / rate.expected_work_per_second * rate.num_gpus


def _work_done(done: Progress) -> float:
    """Return what finished rows have cost in tokens; 0 where nothing was expected of them."""
    return work_of(done.prompt_tokens, done.completion_tokens) if done.expected.work else 0.0


def _scaled(left: int, done: int, expected: int) -> int:
    return round(left * done / expected) if expected else left
