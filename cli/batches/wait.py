"""Wait for a batch and fetch its rows to local files."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.offline.console.errors import CliError, Refused, Stopped
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.files.paths import path_next_to
from tidemill.offline.files.table_options import check_rows_names

from ..api.client import Client
from ..api.objects import Batch
from ..transfer.download import STANDARD_OUTPUT, check_target, fetch_results
from .failures import failures_in, log_failures
from .follow import batch_progress, follow
from .outcome import log_end, print_json


@dataclass(frozen=True, slots=True)
class Targets:
    """Destinations of output rows, error rows and their table: a path, `-`, or None for nowhere."""

    output: str | None
    errors: str | None
    force: bool = False
    table: str | None = None

    @property
    def take_standard_output(self) -> bool:
        """Return whether rows go to standard output, so that nothing else may."""
        return STANDARD_OUTPUT in {self.output, self.errors}

    def resume_command(self, batch_id: str) -> str:
        """Return the `tidemill resume` command with the same targets."""
        flags = [("-o", self.output or self.table), ("-e", self.errors)]
        words = [word for flag, name in flags if name is not None for word in (flag, name)]
        force = ["--force"] if self.force else []
        return shlex.join(["tidemill", "resume", batch_id, *words, *force])


def names_for(file: str) -> tuple[str, str]:
    """Return the default names of result files: next to the input, or in the working folder."""
    return path_next_to(file, "output"), path_next_to(file, "errors")


def targets_if_waited(arguments: argparse.Namespace, file: str) -> Targets | None:
    """Return the targets with --wait, None without; raises Refused."""
    if arguments.wait:
        check_rows_names(arguments.output_file, arguments.error_file)
        return targets_of(arguments, names_for(file), file)
    if arguments.output_file or arguments.error_file:
        raise Refused("-o and -e require --wait, which fetches the rows")
    return None


def targets_of(
    arguments: argparse.Namespace, names: tuple[str, str], file: str | None = None
) -> Targets:
    """Return the targets that the flags name, or the default `names`; raises Refused.

    `file` is the input, which is never overwritten. If the output goes to standard
    output, errors are discarded unless a flag names a file.
    """
    output = arguments.output_file or names[0]
    if arguments.json and STANDARD_OUTPUT in {output, arguments.error_file}:
        raise Refused("--json and rows cannot share standard output: name files with -o and -e")
    errors = arguments.error_file or (None if output == STANDARD_OUTPUT else names[1])
    if output == errors != STANDARD_OUTPUT:
        raise Refused(f"-o and -e are the same file: {output}")
    for name in (output, errors):
        if (
            file is not None
            and name is not None
            and os.path.realpath(name) == os.path.realpath(file)
        ):
            raise Refused(f"{name} is the input: choose another file for its rows")
        check_target(name, force=arguments.force)
    return Targets(output, errors, arguments.force)


def wait_and_fetch(
    client: Client,
    batch: Batch,
    targets: Targets,
    *,
    as_json: bool,
    fetch: Callable[[Batch], object] | None = None,
) -> Batch:
    """Wait until a batch has ended, fetch its rows, to the targets or by `fetch`, and return it."""
    command = targets.resume_command(batch.id)
    waiting = f"the batch {batch.id} continues; to wait for it and fetch its rows"
    with _advising(waiting, command), batch_progress() as show:

        def show_and_print(seen: Batch) -> None:
            show(seen)
            if as_json and not seen.has_ended:
                print_json(seen.fields)

        batch = follow(client, batch, show_and_print)
    with _advising(f"the batch {batch.id} has ended; to fetch its rows", command):
        if fetch is not None:
            fetch(batch)
        else:
            fetch_and_report(client, batch, targets, as_json=as_json)
    return batch


@contextmanager
def _advising(what: str, command: str) -> Iterator[None]:
    """Name the command that does what an error or a signal prevents."""
    try:
        yield
    except Stopped as exc:
        raise Stopped(exc.signum, f"{what}: `{command}`") from exc
    except CliError:
        log(f"{what}: `{command}`")
        raise


def fetch_and_report(client: Client, batch: Batch, targets: Targets, *, as_json: bool) -> None:
    """Fetch the rows of an ended batch, and log its outcome."""
    names = {"output": targets.output, "errors": targets.errors, "table": targets.table}
    saved = fetch_results(client, batch, names, force=targets.force)
    if as_json:
        print_json({**batch.fields, "saved": saved})
    log_end(batch)
    log_row_errors(batch, targets)


def log_row_errors(batch: Batch, targets: Targets) -> None:
    """Log the errors of failed rows, or how to fetch them."""
    if batch.error_file_id is None:
        return
    failed = f"{amount(batch.failed, 'row')} failed"
    if targets.table is not None and targets.output is None:
        has_table = batch.table_file_id is not None
        how = f"fetch them with `tidemill results {batch.id} -e FILE`"
        log(f"{failed}: {'the column `error` says why' if has_table else how}")
    elif targets.errors is None:
        log(f"{failed}: fetch them with -e FILE")
    elif Path(targets.errors).is_file():
        log_failures(failures_in(Path(targets.errors)), targets.errors)
