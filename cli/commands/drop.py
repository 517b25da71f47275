"""`tidemill drop`: a file into a deployment's bucket, where it becomes a batch by itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.batches.options import add_input_flags, file_of, options_of
from cli.batches.outcome import EXIT_STATUSES
from cli.deployment.place import add_place, need_cloud, part_of
from cli.errors import Refused
from cli.signals import StopSignals


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `drop` to the command line."""
    parser = commands.add_parser(
        "drop",
        help="put a file into the bucket, and wait for it if asked",
        description="Checks a file as the server will and puts it into a deployment's bucket under "
        "input/, with the AWS credentials of whoever may write there: JSONL, a JSON array of "
        "requests, or either of them compressed with gzip. Its url is printed on standard output. "
        "With --wait it stays until NAME.batch.json under output/ says how the batch ended, and "
        "fetches its rows.",
        epilog="A file of the same name that is being run is cancelled.\n\n" + EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_input_flags(parser)
    add_place(parser, "bucket")
    parser.add_argument("--name", help="what it is called there, slashes too (the file's name)")
    parser.add_argument(
        "--wait", action="store_true", help="stay until the batch has ended, then fetch its rows"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON on standard output, one value a line, and nothing else there",
    )
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Drop the file and return the exit status."""
    file, fields = file_of(arguments), options_of(arguments)
    need_cloud("`tidemill drop`")
    from cli.batches.bucket import Drop, drop
    from cli.batches.check import form_in
    from cli.batches.wait import targets_if_waited
    from cli.files.source import open_source

    targets = targets_if_waited(arguments, file)
    name = arguments.name or _name_of(file)
    with StopSignals(), open_source(file, tmp_dir=arguments.output_tmp_dir) as source:
        place = Drop.of(part_of(arguments, "bucket"), name, fields, form_in(source.file))
        return drop(place, source, targets, as_json=arguments.json)


def _name_of(file: str) -> str:
    if file == "-" or "://" in file:
        raise Refused("what is no file has no name: give one by --name")
    return Path(file).name
