"""Meter of one shard run: its progress, whose gains are added to the meters of the worker."""

from __future__ import annotations

from dataclasses import replace

from tidemill.batch.file.throughput import RateWindow
from tidemill.batch.progress_counts import Progress

from ..context.context import WorkerContext
from .claim import Claim


class ShardMeter:
    """Durable rows, GPU time and rates of one claimed shard, earlier claims included."""

    def __init__(self, claim: Claim, context: WorkerContext) -> None:
        before = claim.shard.progress
        self.durable = before.without_rates
        self.gpu_seconds = before.gpu_seconds
        earlier = context.paces.pop(claim.shard.batch_id, None)
        self.pace = RateWindow(context.clock) if earlier is None else earlier
        self._batch = claim.batch
        self._shard = claim.shard
        self._context = context
        self._recorded = before
        self._first_row_at = before.first_row_at
        self._last_row_at = before.last_row_at

    @property
    def progress(self) -> Progress:
        """Return the durable progress, its GPU time, and its rates."""
        durable, expected, before = self.durable, self._shard.expected, self._shard.progress
        share = min(1.0, (durable.num_rows + durable.escalated) / self._shard.num_rows)
        by_second = self.gpu_seconds - before.gpu_seconds if self._shard.is_escalated else 0.0
        return replace(
            durable,
            gpu_seconds=round(self.gpu_seconds, 3),
            escalated_gpu_seconds=round(before.escalated_gpu_seconds + by_second, 3),
            expected_input_tokens=round(expected.input * share),
            expected_output_tokens=round(expected.output * share),
            first_row_at=self._first_row_at,
            last_row_at=self._last_row_at,
            **self.pace.rates._asdict(),
        )

    def record(self, progress: Progress) -> None:
        """Record the progress that the table has, and add the difference to the meters.

        Replies may arrive out of order: older progress adds nothing.
        """
        new = progress.since(self._recorded)
        self._recorded += new
        self._context.usage_meter.add(new)
        self._context.rate_meter.add(new)
        self._context.history.add(self._batch, new, self._context.wall())
        self._context.gpu_usage.add(self._batch.tenant, new.gpu_seconds)

    def begin_row(self) -> None:
        """Note that a line is sent to an engine."""
        self._first_row_at = self._first_row_at or round(self._context.wall(), 3)

    def end_row(self) -> None:
        """Note that an engine has answered a line."""
        self._last_row_at = round(self._context.wall(), 3)
