"""Run of a batch file: checks the input, loads the engine, feeds lines and summarises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidemill.engine.config import EngineConfig
from tidemill.protocol.contract import Served

from ..arguments.default_flags import default_arguments
from ..console.errors import (
    OVER_LIMIT,
    ROWS_FAILED,
    CliError,
    EngineLost,
    InputChanged,
    Refused,
    RunIncomplete,
    failure_of,
)
from ..console.signals import StopSignals
from ..console.terminal import amount, log
from ..engine.data_parallel import num_replicas, replica_commands, with_weights
from ..engine.engine import (
    Load,
    chat_template,
    engine_config,
    held_weights,
    load_engine,
    loaded_engine,
    served_names,
)
from ..engine.options import engine_command, stall_limit
from ..engine.watched_engine import Watch
from ..files.http_transfer import RETRY_DELAYS_SECONDS
from ..files.input_check import (
    InputReport,
    refuse_bad_lines,
    refuse_hopeless,
    refuse_other_requests,
    refuse_repeated_ids,
    warn_of_defaults,
    warn_of_duplicates,
    warn_of_failing,
    warn_of_unknown_parameters,
)
from ..files.input_file import InputFile
from ..files.output import LocalFile
from ..files.paths import check_resumable, is_path
from ..files.row_writer import OutputFiles, ResumableWriter
from ..plan.line_index import LineIndex
from ..plan.plan import Plan
from .garbage import rare_collections
from .inputs import check_input, check_names, open_input
from .metrics import RunMetrics, serve_metrics
from .outputs import make_writer, mark_shard, open_files
from .progress import summary, truncated_words
from .replicas import EngineReplicas
from .reuse import open_reuse
from .run import Run
from .run_card import write_card
from .run_options import RunOptions
from .run_span import run_span
from .settings_record import SettingsRecord, check_complete, open_record
from .tally import Tally

if TYPE_CHECKING:
    from tidemill.batch.file.echoed_fields import EchoedFields

# Seconds for which requests wait while S3 fails, in all; an engine is not to seem stalled.
_MEDIA_SECONDS: Final = 300.0
_SHARE_OF_STALL: Final = 0.5
_PREFIX_LEVEL: Final = 2  # lines with the same first 512 bytes go to one engine


def num_engines(options: RunOptions) -> int:
    """Return the number of engines of a run; raises Refused if the machine is too small."""
    count = num_replicas(options, options.data_parallel_size)
    if options.reuse is not None and count > 1:
        raise Refused("--data-parallel-size cannot be combined with --reuse")
    return count


@contextmanager
def replicas(
    options: RunOptions,
    config: EngineConfig,
    names: Sequence[str],
    index: LineIndex,
    created: int,
) -> Iterator[EngineReplicas]:
    """Yield the engines of a run, not yet started, with their weights on this machine."""
    with held_weights(config, options.weights_cache) as here:
        command = engine_command(with_weights(options.with_media_buckets(), here, names))
        command += [*default_arguments(options.defaults), f"--dialect={options.dialect}"]
        command.append(f"--media-seconds={_media_seconds(options)}")
        yield EngineReplicas(
            replica_commands(command, options, num_engines(options)),
            created=created,
            home=_home(index),
            stall_seconds=stall_limit(options),
        )


def _media_seconds(options: RunOptions) -> float:
    return min(_MEDIA_SECONDS, _SHARE_OF_STALL * stall_limit(options))


def _home(index: LineIndex) -> Callable[[int], int]:
    prefixes = index.records["prefixes"][:, _PREFIX_LEVEL].copy()
    return lambda place: int(prefixes[place])


def run_job(
    options: RunOptions,
    *,
    load: Load[Served] = load_engine,
    retry_delays: tuple[float, ...] = RETRY_DELAYS_SECONDS,
    has_guard: bool = False,
) -> int:
    """Run the file and return the exit status: 0 if every line has a row and any row is ok.

    Raises CliError (RunIncomplete for unexpected exceptions), and Stopped for a signal before the
    first row. The output is unchanged until the input has been checked and the model loaded.
    """
    begun: list[Run] = []
    try:
        return _run_job(options, load, retry_delays, begun, has_guard=has_guard)
    except (CliError, KeyboardInterrupt):
        raise
    except BaseException as exc:
        for run in begun:
            with run.adding_resume_hint():
                raise
        if isinstance(exc, OSError):
            raise
        words = f"the run could not start ({failure_of(exc)}): the output is unchanged"
        raise RunIncomplete(words) from exc


def _run_job(
    options: RunOptions,
    load: Load[Served],
    retry_delays: tuple[float, ...],
    begun: list[Run],
    *,
    has_guard: bool,
) -> int:
    """Run the file; add the run to `begun` once it may have written a row."""
    if (found := _options_of_rows(options)) is None:
        return 0
    options = found
    check_names(options)
    _check_resume(options)
    _check_calibration(options)
    num_engines(options)  # before the file is read
    template, names = chat_template(options), served_names(options)
    config = engine_config(options.with_media_buckets(), media_seconds=_media_seconds(options))
    tally, launched, limit = Tally(options.shard), time.monotonic(), options.seconds_limit
    with ExitStack() as stack:
        stack.enter_context(rare_collections())
        signals = stack.enter_context(StopSignals())
        files = open_files(options, retry_delays, stack)
        record = open_record(options, config, template, files)
        options = record.options
        metrics = RunMetrics(tally)
        if options.enable_metrics:
            stack.enter_context(serve_metrics(metrics, options.host, options.port))
        requests = open_input(options, stack, retry_delays)
        tally.unit = requests.form.unit
        is_planned = requests.is_seekable and not options.no_plan
        config = _with_plan(config, options, is_planned=is_planned)
        index = stack.enter_context(closing(LineIndex(options.output_tmp_dir)))
        created = requests.source.created
        if options.reuse is not None:  # results depend on the weights
            config = stack.enter_context(held_weights(config, options.weights_cache))
        echo = _echoed_fields(options, requests)
        reuse = open_reuse(
            options, config, template, names=names, created=created, stack=stack, echo=echo
        )
        report = check_input(options, requests, names, config, index, reuse=reuse)
        _refuse_or_warn(report, options)
        tally.num_rows = report.num_rows
        rows = None if reuse is None else reuse.rows
        with record.explaining():
            writer = make_writer(options, files, requests.lines, tally.num_rows, stack, reused=rows)
        _note_kept(writer, tally, record)
        metrics.writer = writer
        plan = Plan(index, writer.has_row, is_ordered=is_planned)
        deadline = None if limit is None else launched + limit
        run = Run(
            options,
            requests,
            index,
            plan,
            writer,
            metrics,
            signals,
            launched,
            deadline,
            reuse,
            stack.enter_context(run_span(tally, names[0])),
            echo,
            record=record,
        )
        watch = Watch(
            stall_seconds=stall_limit(options),
            advice=writer.resume_hint(),
            exit_status=EngineLost.exit_status,
            has_guard=has_guard,
        )
        engines = _engines(run, load, config, names, template, watch=watch)
        if not _answer_lines(run, engines, begun):
            return 128 + (signals.received or 0)
        changed = _finish(run, files, tally)
    log(summary(tally) if tally.answered else _nothing_to_run(tally))
    if options.row_calibration and tally.num_rows:
        from .calibration import calibrate_run  # late: few runs have one

        calibrate_run(options, record.rows.latest)
    if changed:
        raise InputChanged(changed)
    return OVER_LIMIT if tally.num_not_run else _exit_status(tally, options)


def _echoed_fields(options: RunOptions, requests: InputFile) -> EchoedFields | None:
    """Return the fields that rows have of their lines; None without any."""
    if not options.echo_fields:
        return None
    from tidemill.batch.file.echoed_fields import EchoedFields  # late: few runs have them

    return EchoedFields(options.echo_fields, requests.form.vendor)


def _options_of_rows(options: RunOptions) -> RunOptions | None:
    """Return the options with a file of rows as output; None for a complete table."""
    if options.table is None or options.stage is not None:
        return options
    # Imports for tables are late, here and below: pyarrow is slow to load.
    from .table_run import with_rows_file

    if (found := with_rows_file(options)) is None:
        check_complete(options, engine_config(options), chat_template(options))
        assert options.table is not None
        again = ""
        if options.table.recipe.calibration is not None:
            again = f". To calibrate it again: `tidemill calibrate {options.table.output}`"
        log(f"{options.table.output} is complete: nothing to run{again}")
    return found


def _note_kept(writer: ResumableWriter, tally: Tally, record: SettingsRecord) -> None:
    """Count existing rows before any line runs, and log the number of reused ones."""
    tally.kept, tally.kept_ok = writer.num_kept, writer.num_kept_ok
    tally.reused = writer.num_reused
    record.keep(tally.kept - tally.reused, is_complete=tally.kept == tally.num_rows)
    if tally.reused:
        where = record.options.reuse
        log(f"{amount(tally.reused, 'row')} of {tally.num_rows:,} reused from {where}")


def _with_plan(config: EngineConfig, options: RunOptions, *, is_planned: bool) -> EngineConfig:
    """Return the engine's config for lines in the order of a plan, or without one."""
    return replace(
        config,
        # The plan decides which line starts next; without a plan, the engine does.
        admission="arrival" if is_planned or options.no_plan else "prefix",
        deduplication=not options.no_plan,
        kv_forecast=not options.no_plan,
    )


def _answer_lines(
    run: Run, engines: AbstractContextManager[Served | EngineReplicas], begun: list[Run]
) -> bool:
    """Write the missing rows; return False if a signal stopped the run.

    The run is added to `begun` once it may have written a row.
    """
    tally = run.metrics.tally
    if tally.kept == tally.num_rows:
        begun.append(run)
        run.start_writing()
        return True
    with engines as served:
        begun.append(run)
        run.metrics.served = served
        is_done = run.run_lines(served)
    if not is_done:
        if run.signals.received:
            return False
        run.write_rows_not_run()
    return True


@contextmanager
def _engines(
    run: Run,
    load: Load[Served],
    config: EngineConfig,
    names: tuple[str, ...],
    template: str | None,
    *,
    watch: Watch,
) -> Iterator[Served | EngineReplicas]:
    """Yield the loaded engine of a run, or several that load once lines arrive."""
    if num_engines(run.options) > 1:
        with replicas(run.options, config, names, run.index, run.created) as several:
            yield several
        return
    started = time.monotonic()
    with loaded_engine(load, config, names, template, watch) as served:
        run.metrics.tally.load_seconds = time.monotonic() - started
        yield served


def _finish(run: Run, files: OutputFiles, tally: Tally) -> str | None:
    """Finish the output, write the result table for a table input, and mark a shard.

    Returns a description of the input's change during the run, if any.
    """
    requests = run.requests
    with run.adding_resume_hint():
        run.writer.finish()
        tally.truncated = run.writer.num_truncated
        if requests.table is not None and run.options.stage is None:
            from .table_run import finish_table

            finish_table(run.options, requests.table, tally, run.record.rows.latest)
        changed = requests.source.changed()
        run.record.finish(tally.num_rows)
        is_marked = False
        if requests.part is not None and not changed:
            is_marked = mark_shard(run.options, files, requests.part, tally, run.record.rows)
    has_card = write_card(run, files, tally)
    is_local = isinstance(files.output, LocalFile)
    run.record.settle(
        is_elsewhere=is_marked or has_card or not is_local,
        may_be_retried=tally.rows_failed > 0 or tally.truncated > 0,
    )
    return changed


def _exit_status(tally: Tally, options: RunOptions) -> int:
    is_failure = options.fail_on_error or tally.rows_failed == tally.num_rows
    return ROWS_FAILED if tally.rows_failed and is_failure else 0


def _nothing_to_run(tally: Tally) -> str:
    if not tally.num_rows:
        what = "the input" if tally.shard is None else str(tally.shard)
        return f"{what} has no {tally.unit}s: nothing to run"
    how = "by reuse" if tally.reused else "already"
    result = "its result" if tally.unit == "row" else "its row"
    words = (
        f"{tally.label}every {tally.unit} has {result} {how} ({tally.num_rows:,}): nothing to run"
    )
    return "\n".join((words, *truncated_words(tally)))


def _check_resume(options: RunOptions) -> None:
    if options.resume:
        check_resumable(options.output_file)
    elif options.retry_failed:
        raise Refused("--retry-failed requires --resume")
    elif options.retry_truncated:
        raise Refused("--retry-truncated requires --resume")
    elif options.allow_other_settings:
        raise Refused("--allow-other-settings requires --resume")


def _check_calibration(options: RunOptions) -> None:
    """Raise Refused for rows that are calibrated but not in one file on this machine."""
    if options.row_calibration and (options.shard is not None or not is_path(options.output_file)):
        reason = "with --shard" if options.shard is not None else f"for {options.output_file}"
        raise Refused(
            f"--{next(iter(options.row_calibration))} is not supported {reason}: calibrate the "
            "complete file of rows with `tidemill calibrate`"
        )


def _refuse_or_warn(report: InputReport, options: RunOptions) -> None:
    """Warn about lines that get an error row; raises BadInput if none can run."""
    if options.stage == "second":
        return  # the first model's run has checked these lines
    if options.on_invalid_line == "fail":
        refuse_bad_lines(report)
    refuse_hopeless(report)
    if options.stage == "first":
        refuse_other_requests(report)
    if report.requests.form.is_table:
        refuse_repeated_ids(report)
    warn_of_unknown_parameters(report, is_strict=options.strict_parameters)
    warn_of_failing(report)
    warn_of_defaults(report)
    warn_of_duplicates(report.duplicates, report.unit)
