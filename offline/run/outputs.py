"""Output files of a run: opened, locked, and never overwritten without `--force`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from tidemill.batch.file.lines import RawLine

from ..console.errors import Refused
from ..console.terminal import amount, log
from ..extras import require_extras
from ..files.kept_rows import KeptRows, find_kept_rows, is_success, is_whole_success
from ..files.output import LocalFile, Output, open_output
from ..files.paths import spool_path
from ..files.retry import RetryWriter, finish_retry, is_retry_started, retry_files
from ..files.reused_rows import ReusedRows
from ..files.row_settings import RowSettings
from ..files.row_writer import AppendWriter, OutputFiles, ResumableWriter
from ..files.s3_object import S3Object, is_s3
from ..files.shard import ShardLines
from ..files.shard_mark import mark_finished, mark_path
from ..files.spool import Spool
from .run_options import RunOptions
from .tally import Tally

Lines = Callable[[], Iterator[RawLine]]
"""Reads the input from its start."""


def open_files(options: RunOptions, delays: tuple[float, ...], stack: ExitStack) -> OutputFiles:
    """Open the files of `-o` and `-e`; raises Refused for existing rows without a flag."""
    tmp_dir, paths = options.output_tmp_dir, _paths(options)
    if is_s3(options.output_file):
        require_extras(options.output_file, "cloud")
        from ..files.s3_transfer import check_new_object

        check_new_object(S3Object.parse(options.output_file), force=options.force)
    output = open_output(options.output_file, tmp_dir=tmp_dir, delays=delays)
    stack.callback(output.close)
    if options.resume:
        finish_retry(*paths)
    errors = None
    if options.error_file is not None:
        errors = LocalFile(Path(options.error_file), tmp_dir=tmp_dir, only_if_rows=True)
        stack.callback(errors.close)
    if not (options.resume or options.force):
        _refuse_rows(output, errors)
    return OutputFiles(output, errors, is_for_table=options.table is not None)


def make_writer(
    options: RunOptions,
    files: OutputFiles,
    lines: Lines,
    num_rows: int,
    stack: ExitStack,
    *,
    reused: ReusedRows | None = None,
) -> ResumableWriter:
    """Return the row writer for a new, resumed or retried run; log the kept rows.

    A retry does not use reused rows: it runs failed ones.
    """
    paths = _paths(options)
    marks = [] if options.shard is None else [mark_path(paths[0])]
    if not options.resume:
        nothing = KeptRows(b"", (0,) * (1 if files.errors is None else 2))
        path = files.output.spool_path
        spool = Spool(path, num_rows, tmp_dir=options.output_tmp_dir)
        stack.callback(spool.close)
        is_file = isinstance(files.output, LocalFile)
        stale = [*retry_files(*paths), *([path] if path else []), *marks] if is_file else ()
        return AppendWriter(files, nothing, spool, stale=stale, reused=reused)
    is_ok = is_whole_success if options.retry_truncated else is_success
    retries = options.retry_failed or options.retry_truncated
    is_started = is_retry_started(paths[0])
    kept = find_kept_rows(
        lines(),
        [path for path in paths if path is not None],
        is_ok=is_ok,
        replaces_others=retries or is_started,
    )
    spool = Spool(spool_path(paths[0]), num_rows, tmp_dir=options.output_tmp_dir)
    stack.callback(spool.close)
    num_failed = kept.num_rows - kept.num_ok
    if is_started:
        log("continuing an interrupted retry of failed rows")
    elif not (retries and num_failed):
        spool.load(lines(), kept.num_rows, only_successes=retries, is_ok=is_ok)
        appending = AppendWriter(files, kept, spool, stale=marks, reused=reused)
        num_kept = appending.num_kept - appending.num_reused
        log(f"resuming: {amount(num_kept, 'row')} kept")
        return appending
    spool.load(lines(), kept.num_rows, only_successes=True, is_ok=is_ok)
    retrying = RetryWriter(files, *paths, kept, spool, lines=lines, is_ok=is_ok, stack=stack)
    which = "failed and truncated rows" if options.retry_truncated else "failed rows"
    log(f"resuming: {amount(retrying.num_kept, 'row')} kept, rerunning {which}")
    return retrying


def mark_shard(
    options: RunOptions, files: OutputFiles, lines: ShardLines, tally: Tally, rows: RowSettings
) -> bool:
    """Write the mark of a complete shard; return whether its output is a file."""
    if not isinstance(files.output, LocalFile):
        return False
    mark_finished(
        *_paths(options),
        lines,
        num_rows=tally.num_rows,
        num_errors=tally.rows_failed,
        made_with=rows.as_list(),
    )
    return True


def _paths(options: RunOptions) -> tuple[Path, Path | None]:
    errors = options.error_file
    return Path(options.output_file), None if errors is None else Path(errors)


def _refuse_rows(output: Output, errors: LocalFile | None) -> None:
    if isinstance(output, LocalFile) and output.spool_path.exists():
        raise Refused(
            f"{output.spool_path} contains finished rows of a stopped run: pass --resume to keep "
            "them and run the rest, or --force to start over"
        )
    for file in (output, errors):
        if not isinstance(file, LocalFile) or file.is_empty:
            continue
        ways = ["--force to start over"]
        if isinstance(output, LocalFile):
            ways.insert(0, "--resume to keep them and run the rest")
        if file.holds_rows:
            raise Refused(f"{file.path} already contains rows: pass {', or '.join(ways)}")
        raise Refused(
            f"{file.path} already exists and does not contain rows: choose another file, or pass "
            "--force to overwrite it"
        )
