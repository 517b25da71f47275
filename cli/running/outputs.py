"""The files that a run was told to write: opened, locked, and never written over unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from cli.errors import Refused
from cli.files.output import LocalFile, Output, open_output
from cli.files.resume import Kept, find_kept
from cli.files.retry import Retrying, is_retry_begun, retry_files, settle_retry
from cli.files.spill import Spill, spill_path
from cli.files.writing import Appending, Files, Writing
from cli.running.options import RunOptions
from cli.terminal import amount, say
from engine.batchfile.lines import RawLine

Lines = Callable[[], Iterator[RawLine]]
"""Reads the input from its start."""


def open_files(options: RunOptions, delays: tuple[float, ...], stack: ExitStack) -> Files:
    """Open what `-o` and `-e` name; raises Refused for files that hold rows, unless told."""
    tmp_dir, paths = options.output_tmp_dir, _paths(options)
    output = open_output(options.output_file, tmp_dir=tmp_dir, delays=delays)
    stack.callback(output.close)
    if options.resume:
        settle_retry(*paths)
    errors = None
    if options.error_file is not None:
        errors = LocalFile(Path(options.error_file), tmp_dir=tmp_dir, only_if_rows=True)
        stack.callback(errors.close)
    if not (options.resume or options.force):
        _refuse_rows(output, errors)
    return Files(output, errors)


def writing_of(options: RunOptions, files: Files, lines: Lines, stack: ExitStack) -> Writing:
    """Return which lines are run and how their rows are written; says what is kept."""
    paths = _paths(options)
    if not options.resume:
        nothing = Kept(b"", (0,) * (1 if files.errors is None else 2))
        path = files.output.spill_path
        spill = None if path is None else Spill(path)
        is_file = isinstance(files.output, LocalFile)
        stale = [*retry_files(*paths), *([path] if path else [])] if is_file else ()
        return Appending(files, nothing, spill, stale=stale)
    kept = find_kept(lines(), [path for path in paths if path is not None])
    spill = Spill(spill_path(paths[0]))
    num_failed = kept.num_rows - kept.num_ok
    if is_retry_begun(paths[0]):
        say("a retry of failed rows was cut off: it goes on")
    elif not (options.retry_failed and num_failed):
        spill.load(lines(), kept.num_rows, only_successes=options.retry_failed)
        appending = Appending(files, kept, spill)
        say(f"resuming: {amount(appending.num_kept, 'row')} kept")
        return appending
    spill.load(lines(), kept.num_rows, only_successes=True)
    retrying = Retrying(*paths, kept, spill, lines, stack=stack)
    say(f"resuming: {amount(retrying.num_kept, 'row')} kept, failed ones run again")
    return retrying


def _paths(options: RunOptions) -> tuple[Path, Path | None]:
    errors = options.error_file
    return Path(options.output_file), None if errors is None else Path(errors)


def _refuse_rows(output: Output, errors: LocalFile | None) -> None:
    if isinstance(output, LocalFile) and output.spill_path.exists():
        raise Refused(
            f"{output.spill_path} holds finished rows of a run that was stopped: --resume keeps "
            "them and runs what is missing, --force starts over"
        )
    for file in (output, errors):
        if not isinstance(file, LocalFile) or file.is_empty:
            continue
        ways = ["--force starts over"]
        if isinstance(output, LocalFile):
            ways.insert(0, "--resume keeps them and runs what is missing")
        if file.holds_rows:
            raise Refused(f"{file.path} holds rows already: {', '.join(ways)}")
        raise Refused(
            f"{file.path} is there already and holds something else than rows: name another file, "
            "or --force writes over it"
        )
