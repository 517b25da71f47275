"""From a batch that is on its way to its rows on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from cli.api.client import Client
from cli.api.objects import Batch
from cli.batches.failures import failures_in, tell_failures
from cli.batches.follow import batch_shown, follow
from cli.batches.outcome import exit_status_of, print_json, tell_end
from cli.carrying.fetch import STANDARD_OUTPUT, check_target, fetch_results
from cli.errors import CliError, Refused, Stopped
from cli.files.paths import path_beside
from cli.terminal import amount, say


@dataclass(frozen=True, slots=True)
class Targets:
    """Where good rows and the others go: a path, `-`, or None for nowhere."""

    output: str | None
    errors: str | None
    force: bool = False

    @property
    def take_standard_output(self) -> bool:
        """Say whether rows are printed, so that nothing else may be."""
        return STANDARD_OUTPUT in {self.output, self.errors}

    def how_to_go_on(self, batch_id: str) -> str:
        """Return the command that waits for a batch and fetches its rows to the same places."""
        flags = [("-o", self.output), ("-e", self.errors)]
        words = [word for flag, name in flags if name is not None for word in (flag, name)]
        return shlex.join(
            ["tidemill", "resume", batch_id, *words, *(["--force"] if self.force else [])]
        )


def names_for(file: str) -> tuple[str, str]:
    """Return where the rows of a file go unless told: beside it, or here for what is no file."""
    return path_beside(file, "output"), path_beside(file, "errors")


def targets_if_waited(arguments: argparse.Namespace, file: str) -> Targets | None:
    """Return where the rows of a file go with --wait, None without; raises Refused."""
    if arguments.wait:
        return targets_of(arguments, names_for(file), file)
    if arguments.output_file or arguments.error_file:
        raise Refused("-o and -e are for the rows that --wait fetches: give it too")
    return None


def targets_of(
    arguments: argparse.Namespace, names: tuple[str, str], file: str | None = None
) -> Targets:
    """Return where the flags want rows, else these names; raises Refused for what cannot be.

    `file` is the input, which is never written over. Who has the output on standard output has the
    errors nowhere unless a flag says so.
    """
    output = arguments.output_file or names[0]
    if arguments.json and STANDARD_OUTPUT in {output, arguments.error_file}:
        raise Refused("--json and rows cannot share standard output: name files by -o and -e")
    errors = arguments.error_file or (None if output == STANDARD_OUTPUT else names[1])
    if output == errors != STANDARD_OUTPUT:
        raise Refused(f"-o and -e are the same file: {output}")
    for name in (output, errors):
        if (
            file is not None
            and name is not None
            and os.path.realpath(name) == os.path.realpath(file)
        ):
            raise Refused(f"{name} is the input: name another file for its rows")
        check_target(name, force=arguments.force)
    return Targets(output, errors, arguments.force)


def bring_home(client: Client, batch: Batch, targets: Targets, *, as_json: bool) -> int:
    """Wait until a batch has ended, fetch its rows and return the exit status."""
    go_on = f"`{targets.how_to_go_on(batch.id)}` waits for it and fetches its rows"
    try:
        with batch_shown() as show:

            def tell(seen: Batch) -> None:
                show(seen)
                if as_json and not seen.has_ended:
                    print_json(seen.fields)

            batch = follow(client, batch, tell)
        return fetch_and_tell(client, batch, targets, as_json=as_json)
    except Stopped as exc:
        raise Stopped(exc.signum, f"the batch {batch.id} is not ended by that; {go_on}") from exc
    except CliError:
        say(f"the batch {batch.id} is not ended by this; {go_on}")
        raise


def fetch_and_tell(client: Client, batch: Batch, targets: Targets, *, as_json: bool) -> int:
    """Fetch the rows of a batch that has ended, say how it ended, return the exit status."""
    saved = fetch_results(client, batch, targets.output, targets.errors, force=targets.force)
    if as_json:
        print_json({**batch.fields, "saved": saved})
    tell_end(batch)
    tell_of_errors(batch, targets)
    return exit_status_of(batch)


def tell_of_errors(batch: Batch, targets: Targets) -> None:
    """Say why rows failed, or that there are rows of errors which nobody wanted."""
    if batch.error_file_id is None:
        return
    if targets.errors is None:
        say(f"{amount(batch.failed, 'row')} failed: -e FILE fetches them")
    elif Path(targets.errors).is_file():
        tell_failures(failures_in(Path(targets.errors)), targets.errors)
