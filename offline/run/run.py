"""The part of a run from the loaded engine to the last row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from tidemill.batch.file.throughput import Countdown, RateWindow
from tidemill.batch.parts import NotRun, row_not_run
from tidemill.engine.speculation.cost_model import CostModel, Work
from tidemill.net.tracing import WorkSpan
from tidemill.protocol.contract import EngineError, EngineStats, Responder, Served, Usage

from ..arguments.defaults import DefaultingResponder
from ..console.errors import (
    BadInput,
    CliError,
    EngineLost,
    InputChanged,
    RunIncomplete,
    Stopped,
    failure_of,
)
from ..console.signals import StopSignals
from ..console.terminal import failures_noted, log
from ..engine.watched_engine import EngineStalled
from ..files.input_file import InputFile
from ..files.kept_rows import ROWS_PER_WRITE
from ..files.row_writer import ResumableWriter
from ..files.spool import Row
from ..plan.forecast import Done, Forecast
from ..plan.line_index import LineIndex
from ..plan.plan import Plan
from .feed import Feed, InFlightLimits, RunLine, echoing, line_runner
from .metrics import RunMetrics
from .progress import Reporter, estimate_left, make_reporter
from .replicas import EngineReplicas
from .reuse import KeepingResponder, Reuse
from .run_options import RunOptions
from .run_span import traced
from .settings_record import SettingsRecord
from .tally import Tally

if TYPE_CHECKING:
    from tidemill.batch.file.echoed_fields import EchoedFields

_INFLIGHT_PER_SEQUENCE = 4
_MIN_MEASURED_SECONDS = 0.1
_FORECAST_SECONDS = 2.0
_RECENT_SECONDS = 10.0
_MIN_INTERVAL_SECONDS = 0.1
_OVER_LIMIT = NotRun(
    "batch_expired",
    "This line was not run: the run reached --max-seconds or --max-cost.",
    is_failure=True,
)


@dataclass(frozen=True, slots=True)
class Run:
    """The part of the run from the loaded engine to the last row."""

    options: RunOptions
    requests: InputFile
    index: LineIndex
    plan: Plan
    writer: ResumableWriter
    metrics: RunMetrics
    signals: StopSignals
    launched: float  # on the monotonic clock, like
    deadline: float | None = None
    reuse: Reuse | None = None
    span: WorkSpan | None = None
    echo: EchoedFields | None = None
    record: SettingsRecord = field(kw_only=True)

    def run_lines(self, served: Served | EngineReplicas) -> bool:
        """Run all lines without a row; return False if a signal or the deadline stopped the run."""
        tally = self.metrics.tally
        tally.started = time.monotonic()
        with self.adding_resume_hint(), make_reporter(tally) as reporter:
            is_done = asyncio.run(self._feed(served, reporter))
        if not is_done:
            hint = f". {self.writer.resume_hint()}" if self.signals.received else ""
            log(f"{tally.label}stopped with {self._progress()}{hint}")
        return is_done

    def start_writing(self) -> None:
        """Prepare the output of a run whose lines all have a row already."""
        self.writer.start()
        if self.metrics.tally.reused:
            self.record.start()

    def write_rows_not_run(self) -> None:
        """Write an error row for each line that was not run before the deadline."""
        tally = self.metrics.tally
        with self.adding_resume_hint():
            lines = self.requests.read(self.index, self.plan.unfinished())
            while some := [*islice(lines, ROWS_PER_WRITE)]:
                rows = [(line, row_not_run(line.raw, _OVER_LIMIT)[0].row) for line in some]
                if self.echo is not None:
                    rows = [(line, self.echo.add_to(row, line.raw)) for line, row in rows]
                self.writer.write([(line, Row(row, is_success=False)) for line, row in rows])
                for line, _ in rows:
                    tally.num_not_run += 1
                    tally.count(failure=_OVER_LIMIT.message, line=line.raw.number)

    @contextmanager
    def adding_resume_hint(self) -> Iterator[None]:
        """Add the resume hint to errors that end the run; raises RunIncomplete if unexpected."""
        try:
            yield
        except RunIncomplete as exc:
            raise RunIncomplete(f"{exc}. {self.writer.resume_hint()}") from exc
        except EngineError as exc:
            words = f"the engine has stopped: {exc}. {self.writer.resume_hint()}"
            stacks = exc.stacks if isinstance(exc, EngineStalled) else ""
            raise EngineLost(words, details=stacks) from exc
        except InputChanged as exc:
            raise InputChanged(f"{exc}. {self.writer.resume_hint()}") from exc
        except OSError as exc:
            raise BadInput(f"failed: {exc}. {self.writer.resume_hint()}") from exc
        except Stopped as stop:
            raise Stopped(stop.signum, self.writer.resume_hint()) from None
        except (CliError, KeyboardInterrupt):
            raise
        except BaseException as exc:
            words = f"the run failed unexpectedly ({failure_of(exc)})"
            raise RunIncomplete(f"{words}. {self.writer.resume_hint()}") from exc

    def _progress(self) -> str:
        tally = self.metrics.tally
        if self.writer.is_resumable:
            return f"{tally.rows_done:,} of {tally.num_rows:,} rows finished"
        return f"{self.writer.num_written:,} of {tally.num_rows:,} rows written"

    async def _feed(self, served: Served | EngineReplicas, reporter: Reporter) -> bool:
        if not isinstance(served, EngineReplicas):
            return await self._run_feed(served, self._line_runner(served), reporter)
        async with served.started():
            self.metrics.tally.started = time.monotonic()
            self.metrics.tally.load_seconds = served.load_seconds
            return await self._run_feed(served, served.run_line, reporter)

    def _line_runner(self, served: Served) -> RunLine:
        responder: Responder = served
        if self.reuse is not None:
            responder = KeepingResponder(responder, self.reuse)
        if self.options.defaults.flags:
            responder = DefaultingResponder(responder, self.options.defaults)
        return line_runner(responder, created=self.created, dialect=self.options.dialect)

    @property
    def created(self) -> int:
        """Return the timestamp of the replies: that of kept rows, or of the input."""
        kept = self.writer.created
        return self.requests.source.created if kept is None else kept

    async def _run_feed(
        self, served: Served | EngineReplicas, runner: RunLine, reporter: Reporter
    ) -> bool:
        tally = self.metrics.tally
        info = served.info()
        self.record.check_loaded(info)  # before a file is changed
        self.writer.start()
        self.record.start()
        if self.echo is not None:
            runner = echoing(runner, self.echo)
        if self.span is not None:
            runner = traced(runner, self.span, self.options.defaults.apply)
        max_inflight = self.options.max_inflight or _INFLIGHT_PER_SEQUENCE * info.max_num_seqs
        feed = Feed(
            runner,
            self.writer,
            tally,
            limits=InFlightLimits(max_inflight),
            note_rows=self._note_rows,
        )
        remembered = CostModel.recall(info.model, info.device)
        forecast = Forecast(self.plan, info.max_num_seqs, remembered)
        with self.signals.on_signal(feed.stop):
            if self.deadline is not None:
                left = max(0.0, self.deadline - time.monotonic())
                asyncio.get_running_loop().call_later(left, feed.stop)
            reporting = asyncio.create_task(_report_safely(reporter, tally, served, forecast))
            try:
                async with self.metrics.loop_lag.measured():
                    return await feed.run(self.requests.read(self.index, self.plan))
            finally:
                reporting.cancel()
                with suppress(asyncio.CancelledError):
                    await reporting
                with suppress(EngineError):
                    num_engines = served.num_engines if isinstance(served, EngineReplicas) else 1
                    tally.note_engine(served.stats(), num_engines)
                with (
                    failures_noted("the timings of this run were not saved"),
                    suppress(EngineError),
                ):
                    _save_costs(forecast, served, tally, tally.started - self.launched)

    def _note_rows(self, places: list[int], completion_tokens: list[int]) -> None:
        num_computed = self.plan.finish(places, completion_tokens)
        self.metrics.tally.computed_output_tokens += num_computed


async def _report_safely(
    reporter: Reporter, tally: Tally, served: Served | EngineReplicas, forecast: Forecast
) -> None:
    """Show progress; a failure of the display does not affect rows."""
    with failures_noted("progress is no longer shown"), suppress(EngineError):
        await _report(reporter, tally, served, forecast)


async def _report(
    reporter: Reporter, tally: Tally, served: Served | EngineReplicas, forecast: Forecast
) -> None:
    """Show progress with the row and token rates of the last minute, and the time left."""
    pace, countdown = RateWindow(time.monotonic), Countdown(time.monotonic)
    recent, expected = RateWindow(time.monotonic, _RECENT_SECONDS), None
    num_rows, seen = 0, Usage()
    while True:
        await asyncio.sleep(reporter.seconds)
        stats = served.stats()
        now = Usage(
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.output_tokens,
            audio_seconds=tally.usage.audio_seconds,
        )
        for window in (pace, recent):
            window.add(tally.answered - num_rows, now - seen)
        num_rows, seen = tally.answered, now
        if tally.seconds - forecast.num_seconds >= _FORECAST_SECONDS:
            forecast.update(tally.seconds, _done(tally, stats, forecast.plan))
            expected = None if tally.usage.audio_seconds else forecast.seconds_left()
        rates = pace.rates
        estimate = estimate_left(tally, rates, recent.rates, expected)
        reporter.show(tally, rates, countdown.left(tally.answered, estimate))


def _done(tally: Tally, stats: EngineStats, plan: Plan) -> Done:
    """Return the progress of a run."""
    prefilled = stats.prefilled_tokens or stats.prompt_tokens - stats.cached_tokens
    return Done(
        Work(stats.steps, prefilled, stats.output_tokens, stats.attended_tokens),
        tally.usage.prompt_tokens,
        tally.computed_output_tokens,
        plan.num_waiting + stats.waiting,
        stats.running,
    )


def _save_costs(
    forecast: Forecast, served: Served | EngineReplicas, tally: Tally, fixed_seconds: float
) -> None:
    """Save the measured costs of work, if there was enough to measure."""
    if tally.seconds - forecast.num_seconds >= _MIN_INTERVAL_SECONDS:
        forecast.update(tally.seconds, _done(tally, served.stats(), forecast.plan))
    model, seconds, info = forecast.cost_model, forecast.num_seconds, served.info()
    if model.costs() is not None and seconds >= _MIN_MEASURED_SECONDS:
        model.fixed_seconds = fixed_seconds
        model.save(info.model, info.device, seconds)
