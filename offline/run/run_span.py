"""Span of a run, if the environment sets a tracing endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from tidemill.batch.file.request_span import trace_request
from tidemill.batch.file.run_line import LineResult
from tidemill.net.open_tracing import open_tracing
from tidemill.net.tracing import Value, WorkSpan

from ..console.terminal import failures_noted, log
from ..files.input_file import PlacedLine
from .feed import RunLine
from .tally import Tally


@contextmanager
def run_span(tally: Tally, model: str) -> Iterator[WorkSpan | None]:
    """Yield the span of a run, which ends with the run; None without tracing."""
    tracing = open_tracing(lambda words: log(f"note: {words}"))
    if tracing is None:
        yield None
        return
    with closing(tracing):
        span = tracing.start("run", {"gen_ai.request.model": model})
        error_type = None
        try:
            yield span
        except BaseException as exc:
            error_type = type(exc).__name__
            raise
        finally:
            span.end(_attributes(tally), error_type)


def traced(
    runner: RunLine,
    span: WorkSpan,
    with_defaults: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> RunLine:
    """Return a runner that also records the spans of a sample of lines."""

    async def run(line: PlacedLine) -> LineResult:
        started_ns = time.time_ns()
        answered = await runner(line)
        with failures_noted(f"the span of line {line.raw.number} is missing"):
            trace_request(
                span,
                line.raw,
                answered.row,
                answered.usage,
                is_success=answered.is_success,
                started_ns=started_ns,
                with_defaults=with_defaults,
            )
        return answered

    return run


def _attributes(tally: Tally) -> dict[str, Value]:
    usage = tally.usage
    return {
        "tidemill.rows": tally.num_rows,
        "tidemill.rows.done": tally.rows_done,
        "tidemill.rows.failed": tally.rows_failed,
        "tidemill.rows.truncated": tally.truncated,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
