"""Command `tidemill`; starting it loads only the standard library, so that help is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from tidemill.offline.arguments.parser import Parser, expand_help
from tidemill.offline.arguments.unknown_flags import (
    expand_positional_model,
    parse_known,
)
from tidemill.offline.console.errors import CliError, Refused, Stopped
from tidemill.offline.console.terminal import log, print_details

from .commands import (
    cache,
    calibrate,
    cancel,
    check,
    completion,
    convert,
    diff,
    drop,
    erase,
    estimate,
    join,
    keys,
    launcher,
    local,
    models,
    results,
    resume,
    retry,
    run,
    sample,
    serve,
    status,
    submit,
    tenants,
    view,
    worker,
    workers,
)

# In the order of `tidemill --help`.
_COMMANDS: Final = (
    run,
    check,
    join,
    calibrate,
    estimate,
    sample,
    diff,
    view,
    convert,
    serve,
    models,
    cache,
    submit,
    resume,
    status,
    results,
    retry,
    cancel,
    erase,
    drop,
    worker,
    launcher,
    local,
    keys,
    tenants,
    workers,
    completion,
)


class _Version(argparse.Action):
    """Looks up the version only when `--version` is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the version and exit."""
        from importlib import metadata

        try:
            version = metadata.version("tidemill")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        sys.stdout.write(f"tidemill {version}\n")
        parser.exit()


def make_parser(command_name: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line; each command sets `command` to its function.

    A command's name limits it to this command, in a tenth of the time.
    """
    parser = Parser(
        prog="tidemill",
        description="Run LLM batch files and tables: one row of results for each line.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.set_defaults(command=_without_a_command)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    # A command's module has its name; a script of `completion` has all commands.
    chosen = [each for each in _COMMANDS if each.__name__.rpartition(".")[2] == command_name]
    if chosen == [completion]:
        chosen = []
    for command in chosen or _COMMANDS:
        command.add_command(commands)
    return parser


def _without_a_command(_: argparse.Namespace) -> int:
    raise Refused("no command: use one, such as `tidemill run FILE`; `tidemill --help` lists all")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments, with positional files in `files`; raises Refused."""
    typed = expand_positional_model(retry.expand_rows(expand_help(arguments)))
    typed = serve.add_environment_flags(typed)
    return parse_known(make_parser(typed[0] if typed else None), typed)


def exit_status_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; errors that users can fix show no traceback.

    0 on success; 1 for an invalid input or a failure; 2 for invalid arguments or paths; 128 + n if
    signal n ended it. Commands of the API have further ones: cli/batches/outcome.py.
    """
    try:
        return command()
    except (CliError, Stopped) as exc:
        log(str(exc))
        if isinstance(exc, CliError) and exc.details:
            print_details(exc.details)
        return exc.exit_status
    except KeyboardInterrupt:
        return 130
    except OSError as exc:
        log(f"failed: {exc}")
        return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""

    def command() -> int:
        parsed = parse(sys.argv[1:] if arguments is None else arguments)
        return int(parsed.command(parsed))

    return exit_status_of(command)


if __name__ == "__main__":
    sys.exit(main())
