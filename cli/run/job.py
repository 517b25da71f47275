"""Run of a batch file: check, load, feed and summary, in this order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace

from tidemill.batch.file.lines import MAX_LINE_BYTES
from tidemill.batch.file.throughput import RateWindow
from tidemill.engine.config import EngineConfig
from tidemill.engine.model.endpoint_names import endpoints_of
from tidemill.engine.plan.forecast import Forecast, TokensDone
from tidemill.engine.plan.line_index import LineIndex
from tidemill.engine.plan.plan import Plan
from tidemill.protocol.contract import EngineError, Served, Usage
from tidemill.protocol.routes import ENDPOINTS

from ..console.errors import ROWS_FAILED, BadInput, EngineLost, InputChanged, Refused, Stopped
from ..console.signals import StopSignals
from ..console.terminal import log
from ..engine.engine import (
    Load,
    chat_template,
    engine_config,
    load_engine,
    loaded_engine,
    served_names,
)
from ..files.defaults import DefaultingResponder
from ..files.http_transfer import RETRY_DELAYS_SECONDS
from ..files.input_check import (
    check_lines,
    refuse_bad_lines,
    refuse_hopeless,
    warn_of_defaults,
    warn_of_duplicates,
    warn_of_failing,
)
from ..files.input_file import InputFile, LineSpan
from ..files.paths import check_folder, check_paths, check_resumable
from ..files.row_writer import ResumableWriter
from ..files.source import open_source
from ..files.spool import PlacedLine
from .feed import Feed, InFlightLimits
from .metrics import RunMetrics, serve_metrics
from .outputs import make_writer, open_files
from .progress import Reporter, make_reporter, summary
from .run_options import RunOptions
from .tally import Tally

_INFLIGHT_PER_SEQUENCE = 4


def run_job(
    options: RunOptions,
    *,
    load: Load[Served] = load_engine,
    retry_delays: tuple[float, ...] = RETRY_DELAYS_SECONDS,
) -> int:
    """Run the file and return the exit status: 0 when every line has a row and one is ok.

    Raises CliError for errors that users can fix, Stopped for a signal before the first row. The
    output is unchanged until the input has been checked and the model loaded.
    """
    _check_names(options)
    template, names = chat_template(options), served_names(options)
    config = engine_config(options)
    tally = Tally()
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        files = open_files(options, retry_delays, stack)
        metrics = RunMetrics(tally)
        if options.enable_metrics:
            stack.enter_context(serve_metrics(metrics, options.host, options.port))
        source = stack.enter_context(
            open_source(options.input_file, tmp_dir=options.output_tmp_dir, delays=retry_delays)
        )
        requests = InputFile.from_source(source, options.max_line_bytes or MAX_LINE_BYTES)
        requests = requests.unpack(options.output_tmp_dir, stack)
        is_planned = requests.is_seekable and not options.no_plan
        config = replace(
            config,
            # The plan says who starts next; where there can be none, the engine does.
            admission="arrival" if is_planned or options.no_plan else "prefix",
            deduplication=not options.no_plan,
        )
        index = stack.enter_context(closing(LineIndex(options.output_tmp_dir)))
        tally.num_rows = _check(requests, names, config, options, index)
        writer = make_writer(options, files, requests.lines, tally.num_rows, stack)
        tally.kept, tally.kept_ok = writer.num_kept, writer.num_kept_ok
        run = _Run(
            options,
            requests,
            index,
            Plan(index, writer.has_row, is_ordered=is_planned),
            writer,
            metrics,
            signals,
        )
        if tally.kept < tally.num_rows:
            with loaded_engine(load, config, names, template) as served:
                metrics.served = served
                is_done = run.run_lines(served)
            if not is_done:
                return 128 + (signals.received or 0)
        else:
            writer.start()
        with run.adding_resume_hint():
            writer.finish()
        changed = source.changed()
    log(summary(tally) if tally.answered else _nothing_to_run(tally))
    if changed:
        raise InputChanged(changed)
    return _exit_status(tally, options)


def _exit_status(tally: Tally, options: RunOptions) -> int:
    is_failure = options.fail_on_error or tally.rows_failed == tally.num_rows
    return ROWS_FAILED if tally.rows_failed and is_failure else 0


def _nothing_to_run(tally: Tally) -> str:
    if not tally.num_rows:
        return "the input has no lines: nothing to run"
    return f"every line has its row already ({tally.num_rows:,}): nothing to run"


def _check_names(options: RunOptions) -> None:
    check_paths(options.input_file, options.output_file, options.error_file)
    if options.output_tmp_dir is not None:
        check_folder(options.output_tmp_dir, "--output-tmp-dir")
    if options.resume:
        check_resumable(options.output_file)
    elif options.retry_failed:
        raise Refused("--retry-failed runs failed rows of an output again: give --resume too")


def _check(
    requests: InputFile,
    names: Sequence[str],
    config: EngineConfig,
    options: RunOptions,
    index: LineIndex,
) -> int:
    """Return the number of lines that get a row; raises BadInput when none can run."""
    report = check_lines(
        requests,
        names,
        adapters=[module.name for module in config.lora_modules],
        endpoints=endpoints_of(config) or ENDPOINTS,
        defaults=options.defaults,
        tmp_dir=options.output_tmp_dir,
        index=index,
    )
    if options.on_invalid_line == "fail":
        refuse_bad_lines(report)
    refuse_hopeless(report)
    warn_of_failing(report)
    warn_of_defaults(report)
    warn_of_duplicates(report.duplicates)
    return report.num_rows


@dataclass(frozen=True, slots=True)
class _Run:
    """The part of the run from the loaded engine to the last row."""

    options: RunOptions
    requests: InputFile
    index: LineIndex
    plan: Plan
    writer: ResumableWriter
    metrics: RunMetrics
    signals: StopSignals

    def run_lines(self, served: Served) -> bool:
        """Run all lines without a row; False when a signal stopped it."""
        tally = self.metrics.tally
        tally.started = time.monotonic()
        with self.adding_resume_hint():
            self.writer.start()
            with make_reporter(tally.num_rows, tally.kept) as reporter:
                is_done = asyncio.run(self._feed(served, reporter))
        if not is_done:
            log(f"stopped with {self._progress()}. {self.writer.resume_hint()}")
        return is_done

    @contextmanager
    def adding_resume_hint(self) -> Iterator[None]:
        """Add how to resume to errors that end the run."""
        try:
            yield
        except EngineError as exc:
            words = f"the engine cannot go on: {exc}. {self.writer.resume_hint()}"
            raise EngineLost(words) from exc
        except InputChanged as exc:
            raise InputChanged(f"{exc}. {self.writer.resume_hint()}") from exc
        except OSError as exc:
            raise BadInput(f"failed: {exc}. {self.writer.resume_hint()}") from exc
        except Stopped as stop:
            raise Stopped(stop.signum, self.writer.resume_hint()) from None

    def _progress(self) -> str:
        tally = self.metrics.tally
        if self.writer.is_resumable:
            return f"{tally.rows_done:,} of {tally.num_rows:,} rows finished"
        return f"{self.writer.num_written:,} of {tally.num_rows:,} rows written"

    async def _feed(self, served: Served, reporter: Reporter) -> bool:
        tally = self.metrics.tally
        most = served.info().max_num_seqs
        max_inflight = self.options.max_inflight or _INFLIGHT_PER_SEQUENCE * most
        defaults = self.options.defaults
        feed = Feed(
            DefaultingResponder(served, defaults) if defaults.flags else served,
            self.writer,
            tally,
            created=self.requests.source.created
            if self.writer.created is None
            else self.writer.created,
            limits=InFlightLimits(max_inflight),
            dialect=self.options.dialect,
            note_row=self._note_row,
        )
        with self.signals.on_signal(feed.stop):
            reporting = asyncio.create_task(_report(reporter, tally, served, self.plan))
            try:
                async with self.metrics.loop_lag.measured():
                    return await feed.run(self._lines())
            finally:
                reporting.cancel()
                with suppress(asyncio.CancelledError):
                    await reporting

    def _note_row(self, place: int, usage: Usage) -> None:
        self.plan.finish(place, usage.completion_tokens)
        if not self.plan.is_repeat[place]:
            self.metrics.tally.computed_output_tokens += usage.completion_tokens

    def _lines(self) -> Iterator[PlacedLine]:
        """Yield the lines without a row, in the order of the plan."""
        if not self.requests.is_seekable:
            for place, raw in enumerate(self.requests.lines()):
                if not self.writer.has_row(place):
                    yield PlacedLine(place, raw)
            return
        records = self.index.records
        for place in self.plan:
            start, num_bytes, number, *_ = records[place].item()
            yield PlacedLine(place, self.requests.read(LineSpan(start, num_bytes, number)))


async def _report(reporter: Reporter, tally: Tally, served: Served, plan: Plan) -> None:
    """Show progress with the row and token rates of the last minute, and the time left."""
    pace, forecast = RateWindow(time.monotonic), Forecast(plan)
    num_rows, seen = 0, Usage()
    while True:
        await asyncio.sleep(reporter.seconds)
        stats = served.stats()
        now = Usage(
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.output_tokens,
            audio_seconds=tally.usage.audio_seconds,
        )
        pace.add(tally.answered - num_rows, now - seen)
        num_rows, seen = tally.answered, now
        done = TokensDone(
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.output_tokens,
            tally.usage.prompt_tokens,
            tally.computed_output_tokens,
        )
        forecast.update(tally.seconds, done)
        left = None if tally.usage.audio_seconds else forecast.seconds_left()
        reporter.show(tally, pace.rates, left)
