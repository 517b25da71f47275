"""Flags of `tidemill run`, and their conversion to options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..arguments.argument_types import (
    field_names,
    port_number,
    positive_int,
    positive_number,
    size_in_bytes,
)
from ..arguments.calibration_flags import NAMES, calibration_keys
from ..arguments.cascade_flags import add_cascade_flags, cascade_of
from ..arguments.dataset_id import add_dataset_flags
from ..arguments.default_flags import add_default_flags, defaults_of
from ..arguments.parser import Parser, add_tmp_dir_flag
from ..arguments.recipe_flags import add_recipe_flags, has_recipe, only_calibrates
from ..arguments.typed_flags import repeated_flags
from ..arguments.unknown_flags import parse_known
from ..console.errors import Refused
from ..engine.data_parallel import add_data_parallel_flag
from ..engine.options import add_engine_flags, engine_fields
from ..files.paths import name_files, name_shard_files
from ..files.shard import add_shard_flag
from ..files.table_options import check_rows_names, format_of, table_options
from .reuse_flags import add_reuse_flags, add_reuse_size_flag
from .run_options import RunOptions

_EPILOG = """\
examples:
  tidemill run requests.jsonl                            (rows in requests.output.jsonl)
  tidemill run requests.jsonl -o rows.jsonl --model ./model
  tidemill run requests.jsonl --resume                   (after a kill: runs missing rows)
  tidemill run requests.jsonl --resume --retry-failed    (reruns failed rows)
  tidemill run requests.jsonl --resume --retry-truncated --max-tokens 400
  tidemill run reviews.parquet --prompt 'Label this review: {{ text }}' --id review_id
  tidemill run requests.jsonl --shard 3/8                (rows in requests.output.jsonl.3-of-8)
  tidemill run requests.jsonl --temperature 0 --max-tokens 200 --system-prompt "Be brief."
  cat requests.jsonl | tidemill run - > rows.jsonl

exit status:
  0  every line has a row, and at least one succeeded (or there were no lines)
  1  an invalid input, or a failure
  2  invalid arguments or paths; nothing was read or written
  3  every line has a row, but none succeeded; with --fail-on-error: at least one failed
  4  the engine exited or hung because of its device or machine; continue with --resume
  5  --max-seconds or --max-cost was reached; run the rest with --resume --retry-failed
  6  an unexpected failure, and some lines have no row; continue with --resume
  128 + n  stopped by signal n (130: Ctrl-C); continue with --resume
"""


def add_run_parser(
    commands: argparse._SubParsersAction[Any],
) -> argparse.ArgumentParser:
    """Add `run` to the commands, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        usage="tidemill run [FILE | -i FILE] [-o FILE] [--model MODEL] [flags]",
        help="run a batch file on this machine",
        description="Run every line of a batch file through a model and write one row for each, "
        "in the same order.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_file_flags(parser.add_argument_group("files"))
    _add_limit_flags(parser.add_argument_group("limits of the run"))
    add_recipe_flags(parser)
    add_cascade_flags(parser.add_argument_group("cascades of two models"))
    add_dataset_flags(parser)
    add_default_flags(parser.add_argument_group("defaults for lines that do not set them"))
    add_engine_flags(parser)
    _add_metrics_flags(parser.add_argument_group("metrics"))
    parser.set_defaults(files=(), typed=())
    return parser


def parse_run(flags: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags of a `tidemill run`, without any other command; raises Refused."""
    parser = Parser(prog="tidemill", allow_abbrev=False)
    add_run_parser(parser.add_subparsers())
    return parse_known(parser, ["run", *flags])


def _add_file_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-i",
        "--input-file",
        metavar="FILE",
        help="read a path, -, an http(s) URL or s3://bucket/key; -i may be omitted",
    )
    add(
        "-o",
        "--output-file",
        metavar="FILE",
        help="write rows to a path (during the run), -, an http(s) URL (by PUT), or "
        "s3://bucket/key (default: FILE.output.jsonl next to the input; for a table, with "
        "its suffix, such as FILE.output.csv)",
    )
    add("-e", "--error-file", metavar="FILE", help="write failed rows to this path")
    add_tmp_dir_flag(group)
    add_shard_flag(
        group,
        "run shard I of N of the file, such as 3/8, and write its rows to FILE.3-of-8; join all "
        "shards with `tidemill join`",
    )
    add(
        "--echo-fields",
        type=field_names,
        default=(),
        metavar="NAMES",
        help="copy these comma-separated fields of a line, such as metadata, to its row",
    )
    _add_rows_flags(group)
    card = group.add_mutually_exclusive_group()
    card.add_argument(
        "--no-card", action="store_true", help="do not write a run card (OUTPUT.card.json)"
    )
    card.add_argument(
        "--card-markdown", action="store_true", help="also write the run card as OUTPUT.card.md"
    )
    add(
        "--dialect",
        choices=("openai", "vllm"),
        default="openai",
        help="set the format of error rows (default: openai)",
    )
    add(
        "--on-invalid-line",
        choices=("fail", "skip"),
        default="fail",
        help="fail: reject a file with malformed lines; skip: give those an error row "
        "(default: fail)",
    )
    add(
        "--strict-parameters",
        action="store_true",
        help="reject a file with unknown parameters (default: ignore them, with a warning)",
    )
    add(
        "--max-inflight",
        type=positive_int,
        metavar="N",
        help="limit concurrent requests in the engine (default: 4 times --max-num-seqs)",
    )
    add(
        "--no-plan",
        action="store_true",
        help="start lines in file order and do not deduplicate them (default: order by common "
        "prefix, longest outputs first)",
    )
    add_data_parallel_flag(group)
    add_reuse_flags(group)
    add_reuse_size_flag(group)
    add(
        "--max-line-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="reject longer lines (default: 36M)",
    )


def _add_rows_flags(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows in the output and run the remaining lines",
    )
    either.add_argument(
        "--force", action="store_true", help="overwrite an output that already contains rows"
    )
    add = group.add_argument
    add(
        "--retry-failed",
        action="store_true",
        help="with --resume: rerun failed rows and replace them in place",
    )
    add(
        "--retry-truncated",
        action="store_true",
        help="with --resume: rerun failed rows and truncated ones (finish_reason length); "
        "--max-tokens may be higher than before",
    )
    add(
        "--allow-other-settings",
        action="store_true",
        help="with --resume: keep rows with other settings, such as another model or --temperature "
        "(default: reject them)",
    )
    add("--fail-on-error", action="store_true", help="exit with 3 if any row failed")


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-seconds",
        type=positive_number,
        metavar="N",
        help="stop after N seconds, including model loading, with an error row for lines that "
        "have not run",
    )
    add(
        "--max-cost",
        type=positive_number,
        metavar="COST",
        help="stop in the same way when the machine has cost COST (requires --price-per-hour)",
    )
    add("--price-per-hour", type=positive_number, metavar="PRICE", help="set this machine's price")


def _add_metrics_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--enable-metrics", action="store_true", help="serve Prometheus metrics at /metrics")
    add("--host", default="127.0.0.1", help="serve metrics on this address (default: 127.0.0.1)")
    add(
        "--port",
        type=port_number,
        default=8000,
        help="serve metrics on this port; 0 picks a free one (default: 8000)",
    )


def take_row_calibration(arguments: argparse.Namespace, file: str) -> dict[str, Any]:
    """Return the keys that calibrate the rows of a file of requests, and clear their flags."""
    if not only_calibrates(arguments, file) or format_of(file) not in {None, "jsonl"}:
        return {}
    keys = calibration_keys(arguments)
    for name in NAMES:
        setattr(arguments, name, None)
    return keys


def take_line_url(arguments: argparse.Namespace, file: str) -> str | None:
    """Return the endpoint of lines that name none, and clear its flag; None for a table.

    Raises Refused for an unknown endpoint.
    """
    url = arguments.url
    if url is None or has_recipe(arguments, file) or format_of(file) not in {None, "jsonl"}:
        return None
    arguments.url = None
    from tidemill.protocol.errors import RequestError
    from tidemill.protocol.routes import known_route

    try:
        return known_route(url).name
    except RequestError as exc:
        raise Refused(f"--url: {exc.message}") from exc


def options_from(arguments: argparse.Namespace) -> RunOptions:
    """Return the options of the parsed arguments."""
    named = arguments.output_file
    names = name_files(arguments.input_file, named, arguments.files)
    arguments.input_file, arguments.output_file = names
    arguments.line_url = take_line_url(arguments, names[0])
    arguments.row_calibration = take_row_calibration(arguments, names[0])
    arguments.table = table_options(arguments, names[0], named, more_extras=("engine",))
    if arguments.table is not None:
        arguments.output_file = str(arguments.table.output)
    else:
        check_rows_names(names[1], arguments.error_file, input_file=names[0])
        if arguments.shard is not None:
            arguments.output_file, arguments.error_file = name_shard_files(
                arguments.shard, *names, arguments.error_file
            )
    arguments.defaults = defaults_of(arguments)
    if arguments.table is not None and (recipe := arguments.table.recipe).escalate is not None:
        arguments.escalate = arguments.escalate or recipe.escalate
        arguments.escalate_by = arguments.escalate_by or recipe.escalate_by
        if arguments.escalate_below is None and arguments.target_accuracy is None:
            arguments.escalate_below = recipe.escalate_below
            arguments.target_accuracy = recipe.target_accuracy
    arguments.cascade, arguments.stage = cascade_of(arguments), None
    arguments.typed_flags = repeated_flags(arguments.typed, arguments.files)
    given = {field.name: getattr(arguments, field.name) for field in fields(RunOptions)}
    return RunOptions(**given | engine_fields(arguments))
