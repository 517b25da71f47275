"""`tidemill run`: runs an input file through the engine, one row per line."""

from __future__ import annotations

import argparse
from functools import partial

from tidemill.offline.console.errors import OVER_LIMIT, ROWS_FAILED
from tidemill.offline.console.terminal import log
from tidemill.offline.engine.engine import load_engine, require_engine
from tidemill.offline.files.paths import is_path
from tidemill.offline.run.run_flags import add_run_parser, options_from


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    add_run_parser(commands).set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run the file and return the exit status."""
    is_output_named = arguments.output_file is not None
    options = options_from(arguments)
    require_engine("a run", options.model)
    load = partial(load_engine, weights_cache=options.weights_cache)
    # Imported late: JSON libraries would slow down `--help`.
    if options.cascade is None:
        from tidemill.offline.run.job import run_job

        status = run_job(options, load=load, has_guard=True)
    else:
        from tidemill.offline.run.cascade import run_cascade

        status = run_cascade(options, load=load, has_guard=True)
    if (
        status in {0, ROWS_FAILED, OVER_LIMIT}
        and not is_output_named
        and is_path(options.output_file)
        and not (options.table and options.shard)
    ):
        log(f"the rows are in {options.output_file}")
    return status
