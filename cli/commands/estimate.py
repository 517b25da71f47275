"""`tidemill estimate`: estimates tokens, time and cost of a file, before anything runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.offline.arguments.argument_types import (
    positive_int,
    positive_number,
    size_in_bytes,
)
from tidemill.offline.arguments.dataset_id import add_dataset_flags
from tidemill.offline.arguments.default_flags import add_default_flags, defaults_of
from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.arguments.recipe_flags import add_recipe_flags
from tidemill.offline.console.tables import columns
from tidemill.offline.console.terminal import amount, duration, print_output
from tidemill.offline.engine.engine import require_engine
from tidemill.offline.engine.options import add_engine_flags, engine_fields
from tidemill.offline.files.paths import STANDARD_STREAM, name_files
from tidemill.offline.files.shard import add_shard_flag
from tidemill.offline.files.table_options import table_options
from tidemill.offline.run.reuse_flags import add_reuse_flags
from tidemill.offline.run.run_flags import take_row_calibration

if TYPE_CHECKING:
    from tidemill.offline.estimate.estimate import Estimate

_EPILOG = """\
examples:
  tidemill estimate requests.jsonl --model ./model
  tidemill estimate requests.jsonl --model ./model --sample 256 --price-per-hour 3.5

exit status:
  0  at least one line would run
  1  an invalid input, or none of its lines would run
  2  invalid arguments or paths
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `estimate` to the command line."""
    parser = commands.add_parser(
        "estimate",
        usage="tidemill estimate [FILE | -i FILE] [--model MODEL] [--sample N] [flags]",
        help="estimate tokens, time and cost of a batch file on this machine",
        description="Count the lines and tokens of a batch file, their shared prefixes and the\n"
        "lines that would fail, and estimate time and cost. No weights are loaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-i",
        "--input-file",
        metavar="FILE",
        help="read a path, - or an http(s) URL; -i may be omitted",
    )
    add(
        "--sample",
        type=positive_int,
        default=0,
        metavar="N",
        help="run N lines first, evenly spread, and extrapolate (their rows are discarded)",
    )
    add("--price-per-hour", type=positive_number, metavar="PRICE", help="set this machine's price")
    add_shard_flag(parser, "estimate shard I of N of the file, such as 3/8")
    add("--json", action="store_true", help="print one JSON object")
    add_tmp_dir_flag(parser)
    add("--max-line-bytes", type=size_in_bytes, metavar="SIZE", help="reject longer lines")
    add_reuse_flags(parser)
    add_recipe_flags(parser)
    add_dataset_flags(parser)
    add_default_flags(parser.add_argument_group("defaults for lines that do not set them"))
    add_engine_flags(parser)
    parser.set_defaults(command=command, files=())


def command(arguments: argparse.Namespace) -> int:
    """Print the estimate and return the exit status: 1 when no line would run."""
    source, _ = name_files(arguments.input_file, STANDARD_STREAM, arguments.files)
    row_calibration = take_row_calibration(arguments, source)
    table = table_options(arguments, source, None, is_written=False, more_extras=("engine",))
    require_engine("an estimate", arguments.model)
    # Imported late: torch would slow down `--help`.
    from tidemill.offline.estimate.estimate import estimate
    from tidemill.offline.run.run_options import RunOptions

    options = RunOptions(
        **engine_fields(arguments),
        input_file=source,
        output_file=STANDARD_STREAM,
        shard=arguments.shard,
        output_tmp_dir=arguments.output_tmp_dir,
        max_line_bytes=arguments.max_line_bytes,
        price_per_hour=arguments.price_per_hour,
        reuse=arguments.reuse,
        reuse_sampled=arguments.reuse_sampled,
        defaults=defaults_of(arguments),
        table=table,
        row_calibration=row_calibration,
    )
    found = estimate(options, arguments.sample)
    if arguments.json:
        print_output(json.dumps(found.fields(), ensure_ascii=False, indent=2))
    else:
        # Imported late, as in all commands: `--help` loads the standard library only.
        from tidemill.batch.calibration.report import report_lines

        lines = [*columns([*rows_of(found)])]
        unknown = [f"  {each.sentence(found.unit)}" for each in found.unknown_parameters]
        plan = None if table is None else table.recipe.calibration
        saved = plan.saved.report_lines() if plan is not None and plan.saved is not None else ()
        sampled = [f"on {found.num_sampled:,} sampled {found.unit}s:"] if found.decisions else []
        sampled += [line for report in found.decisions for line in report_lines(report)]
        print_output("\n".join((*lines, *found.reasons, *unknown, *saved, *sampled)))
    return int(0 < found.num_lines == found.num_failing)


def rows_of(found: Estimate) -> Iterator[tuple[str, str]]:
    """Yield the estimate as rows of a table."""
    unit = found.unit
    yield f"{unit}s", f"{found.num_lines:,}"
    if found.num_reused:
        yield "reused", f"{amount(found.num_reused, unit)}; tokens and time do not include them"
    if found.num_repeats:
        yield "repeats", f"{amount(found.num_repeats, unit)}, computed once"
    for kind in found.kinds:
        yield "of these", f"{kind.num_lines:,} to {kind.url}, model {kind.model or '-'}"
    if found.num_unlimited:
        lines = amount(found.num_unlimited, unit)
        yield "max_tokens", f"not set for {lines}, whose answers may fill the context"
    if found.prompt_tokens is None or found.quantiles is None:
        if found.num_reused == found.num_lines:
            yield "tokens", f"none: every {unit} has a stored result"
        else:
            yield "tokens", "not counted: the model does not generate text, or no request can run"
    else:
        spread = found.quantiles
        yield "prompt tokens", f"{found.prompt_tokens:,}"
        low, high = f"least {spread.least:,}, median {spread.median:,}", f"p99 {spread.p99:,}"
        yield f"per {unit}", f"{low}, {high}, most {spread.most:,}"
        if found.num_tokenized is not None and found.num_tokenized < found.num_lines:
            yield "tokenized", f"{found.num_tokenized:,} {unit}s, as a sample of all"
        share = (found.shared_tokens or 0) / max(1, found.prompt_tokens)
        yield "shared", f"{found.shared_tokens:,} of them ({share:.0%}) are shared prefixes"
        yield "output tokens", f"{found.output_tokens:,}, at most {found.most_output_tokens:,}"
        if found.seconds is None:
            yield "time", f"unknown: {_way_to_know(found)}"
        else:
            yield "time", f"{duration(found.seconds)} on this machine"
        if found.cost is not None:
            yield "cost", f"{found.cost:,.2f}"
    yield "would fail", amount(found.num_failing, unit)


def _way_to_know(found: Estimate) -> str:
    if found.num_sampled:
        return "the sample was too short to measure: pass a larger --sample N"
    return "run a file with this model here first, or pass --sample N"
