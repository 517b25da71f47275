"""Span of a shard's run, in the trace of its batch, and the span of the batch itself."""

from __future__ import annotations

import time

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.request_span import trace_request
from tidemill.batch.model import Batch, Shard
from tidemill.batch.progress_counts import Progress
from tidemill.engine_process.frames import Row
from tidemill.net.tracing import Tracing, Value

from ...observability import logger

_GOOD = frozenset({"committed", "escalated", "released", "cancelled"})


class ShardSpan:
    """Span of one run of a shard; does nothing if tracing is off."""

    def __init__(self, tracing: Tracing | None, batch: Batch, shard: Shard) -> None:
        self._tracing = tracing
        self._batch = batch
        self._span = None
        if tracing is not None:
            attributes: dict[str, Value] = {
                **_batch_attributes(batch),
                "tidemill.shard": shard.number,
                "tidemill.fence": shard.fence,
                "tidemill.rows": shard.num_rows,
            }
            self._span = tracing.start("shard", attributes, trace=batch.id)

    def add(self, line: RawLine, row: Row, started_ns: int) -> None:
        """Add a line that an engine has answered, if it is in the sample."""
        if self._span is None:
            return
        try:
            trace_request(
                self._span,
                line,
                row.row,
                row.usage,
                is_success=row.is_success,
                started_ns=started_ns,
            )
        except Exception:  # noqa: BLE001 - the row does not depend on it
            logger.exception("span could not be added", line=line.number)

    def add_batch(self) -> None:
        """Add the span of the batch, from its creation to now, when its last shard is committed."""
        if self._tracing is not None:
            batch = self._batch
            attributes = {**_batch_attributes(batch), "tidemill.rows": batch.num_rows}
            started_ns = batch.created_at * 10**9
            self._tracing.add_root(batch.id, "batch", min(started_ns, time.time_ns()), attributes)

    def end(self, outcome: str, done: Progress) -> None:
        """End the span; a released shard was given back on purpose."""
        if self._span is not None:
            attributes: dict[str, Value] = {
                "tidemill.outcome": outcome,
                "tidemill.rows.done": done.num_rows,
                "tidemill.rows.failed": done.failed,
                "gen_ai.usage.input_tokens": done.prompt_tokens,
                "gen_ai.usage.output_tokens": done.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
            }
            self._span.end(attributes, None if outcome in _GOOD else outcome)


def _batch_attributes(batch: Batch) -> dict[str, Value]:
    model = {} if batch.model is None else {"gen_ai.request.model": batch.model}
    return {"tidemill.batch.id": batch.id, **model}
