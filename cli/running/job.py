"""One run from the first check to the summary: the order in which its parts come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from cli.errors import ROWS_FAILED, BadInput, EngineLost, InputChanged, Refused, Stopped
from cli.files.check import (
    check_lines,
    refuse_bad_lines,
    refuse_hopeless,
    warn_of_defaults,
    warn_of_duplicates,
    warn_of_failing,
)
from cli.files.defaults import WithDefaults
from cli.files.paths import check_folder, check_paths, check_resumable
from cli.files.requests import Requests
from cli.files.source import open_source
from cli.files.transfer import RETRY_DELAYS_SECONDS
from cli.files.writing import Writing
from cli.running.feed import Feed, Window
from cli.running.metrics import Live, serve_metrics
from cli.running.options import RunOptions
from cli.running.outputs import open_files, writing_of
from cli.running.progress import Reporter, make_reporter, summary
from cli.running.tally import Tally
from cli.serving.engine import (
    Load,
    chat_template,
    engine_config,
    load_engine,
    loaded,
    served_names,
)
from cli.signals import StopSignals
from cli.terminal import say
from engine.batchfile.lines import MAX_LINE_BYTES
from engine.batchfile.pace import Pace
from engine.config import EngineConfig
from engine.contract import Served, Usage
from engine.errors import EngineError
from engine.model.task import endpoints_of
from engine.protocol.routes import ENDPOINTS

_INFLIGHT_PER_SEQUENCE = 4


def run_job(
    options: RunOptions,
    *,
    load: Load[Served] = load_engine,
    retry_delays: tuple[float, ...] = RETRY_DELAYS_SECONDS,
) -> int:
    """Run the file and return the exit status: 0 when every line has its row and one is ok.

    Raises CliError for what the user can mend, Stopped for a signal before the first row. The
    output is untouched until the whole input has been checked and the model has loaded.
    """
    _check_names(options)
    template, names = chat_template(options), served_names(options)
    config = engine_config(options)
    tally = Tally()
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        files = open_files(options, retry_delays, stack)
        live = Live(tally)
        if options.enable_metrics:
            stack.enter_context(serve_metrics(live, options.host, options.port))
        source = stack.enter_context(
            open_source(options.input_file, tmp_dir=options.output_tmp_dir, delays=retry_delays)
        )
        requests = Requests.of(source, options.max_line_bytes or MAX_LINE_BYTES)
        tally.num_rows = _check(requests, names, config, options)
        writing = writing_of(options, files, requests.lines, stack)
        tally.kept, tally.kept_ok = writing.num_kept, writing.num_kept_ok
        run = _Run(options, config, requests, writing, live, signals)
        if tally.kept < tally.num_rows:
            with loaded(load, config, names, template) as served:
                live.served = served
                is_done = run.run_lines(served)
            if not is_done:
                return 128 + (signals.received or 0)
        else:
            writing.begin()
        with run.telling_how_to_go_on():
            writing.finish()
        changed = source.changed()
    say(summary(tally) if tally.answered else _nothing_to_run(tally))
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
    requests: Requests, names: Sequence[str], config: EngineConfig, options: RunOptions
) -> int:
    """Return how many lines get a row; raises BadInput when they cannot be run."""
    checked = check_lines(
        requests,
        names,
        adapters=[module.name for module in config.lora_modules],
        endpoints=endpoints_of(config) or ENDPOINTS,
        defaults=options.defaults,
        tmp_dir=options.output_tmp_dir,
    )
    if options.on_invalid_line == "fail":
        refuse_bad_lines(checked)
    refuse_hopeless(checked)
    warn_of_failing(checked)
    warn_of_defaults(checked)
    warn_of_duplicates(checked.duplicates)
    return checked.num_rows


@dataclass(frozen=True, slots=True)
class _Run:
    """The part between a loaded engine and the last row."""

    options: RunOptions
    config: EngineConfig
    requests: Requests
    writing: Writing
    live: Live
    signals: StopSignals

    def run_lines(self, served: Served) -> bool:
        """Answer all lines that have no row yet; False when a signal stopped it in the middle."""
        tally = self.live.tally
        tally.started = time.monotonic()
        with self.telling_how_to_go_on():
            self.writing.begin()
            with make_reporter(tally.num_rows, tally.kept) as reporter:
                is_done = asyncio.run(self._feed(served, reporter))
        if not is_done:
            say(f"stopped with {self._progress()}. {self.writing.how_to_go_on()}")
        return is_done

    @contextmanager
    def telling_how_to_go_on(self) -> Iterator[None]:
        """Add what can be done next to whatever ends the run once rows may be there."""
        try:
            yield
        except EngineError as exc:
            words = f"the engine cannot go on: {exc}. {self.writing.how_to_go_on()}"
            raise EngineLost(words) from exc
        except InputChanged as exc:
            raise InputChanged(f"{exc}. {self.writing.how_to_go_on()}") from exc
        except OSError as exc:
            raise BadInput(f"failed: {exc}. {self.writing.how_to_go_on()}") from exc
        except Stopped as stop:
            raise Stopped(stop.signum, self.writing.how_to_go_on()) from None

    def _progress(self) -> str:
        tally = self.live.tally
        if self.writing.spill is None:
            return f"{tally.kept + tally.written:,} of {tally.num_rows:,} rows written"
        return f"{tally.rows_done:,} of {tally.num_rows:,} rows finished"

    async def _feed(self, served: Served, reporter: Reporter) -> bool:
        tally = self.live.tally
        most = served.info().max_num_seqs
        max_inflight = self.options.max_inflight or _INFLIGHT_PER_SEQUENCE * most
        defaults = self.options.defaults
        feed = Feed(
            WithDefaults(served, defaults) if defaults.flags else served,
            self.writing,
            tally,
            created=self.requests.source.created
            if self.writing.created is None
            else self.writing.created,
            window=Window(max_inflight),
            dialect=self.options.dialect,
            spill=self.writing.spill,
        )
        with self.signals.heard_by(feed.stop):
            reporting = asyncio.create_task(_report(reporter, tally, served))
            try:
                async with self.live.loop_lag.measured():
                    return await feed.run(self.writing.lines(self.requests.lines()))
            finally:
                reporting.cancel()
                with suppress(asyncio.CancelledError):
                    await reporting


async def _report(reporter: Reporter, tally: Tally, served: Served) -> None:
    """Show finished rows, and tokens as they come and go, at the rates of the last minute."""
    pace = Pace(time.monotonic)
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
        reporter.show(tally, pace.rates)
