"""Flags of `tidemill worker`; a deployment's configuration is checked with the same parser."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments.argument_types import positive_int, size_in_bytes
from ..arguments.parser import Parser
from ..arguments.unknown_flags import parse_known
from ..console.errors import Refused
from .data_parallel import add_data_parallel_flag
from .options import add_engine_flags

_IDLE_SECONDS = "300"


def add_worker_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Add the flags of a worker and its engine; return the names of the worker's settings."""
    groups = [parser.add_argument_group(name) for name in ("resources", "work", "times")]
    for group, add_flags in zip(groups, (_add_resources, _add_work, _add_times), strict=True):
        add_flags(group)
    settings = [action.dest for group in groups for action in group._group_actions]  # noqa: SLF001
    add_data_parallel_flag(parser.add_argument_group("engines"))
    add_engine_flags(parser)
    return settings


def check_worker_flags(flags: Sequence[str]) -> None:
    """Raise Refused for flags that `tidemill worker` would refuse."""
    parser = Parser(prog="tidemill worker", add_help=False, allow_abbrev=False)
    settings = add_worker_flags(parser)
    parsed = vars(parse_known(parser, flags))
    check_media_buckets(parsed["allowed_media_buckets"])
    given = {name: parsed[name] for name in settings if parsed[name] is not None}
    from pydantic import ValidationError

    from tidemill.handler.worker.context.config import read_config

    try:
        read_config({}, {"queue": "the model's", **given})
    except ValidationError as exc:
        raise Refused("; ".join(setting_errors(exc.errors()))) from exc


def check_media_buckets(given: Sequence[str]) -> None:
    """Raise Refused for buckets of media: a worker reads only its own bucket."""
    if given:
        raise Refused(
            "--allowed-media-buckets does not apply to a worker, which reads only media/ of its "
            "bucket: remove it"
        )


def setting_errors(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each invalid setting, with its flag and variable."""
    complaints = []
    for error in errors:
        name = ".".join(str(part) for part in error["loc"])
        complaints.append(f"--{name.replace('_', '-')} or TIDEMILL_{name.upper()}: {error['msg']}")
    return complaints


def _add_resources(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--queue", metavar="URL", help="take shards from this queue (default: the served model's)")
    add("--control-queue", metavar="URL", help="send batch events to this queue")
    add("--table", metavar="NAME", help="use this DynamoDB table")
    add("--bucket", metavar="NAME", help="use this bucket")
    add(
        "--weights-region",
        metavar="REGION",
        help="allow s3:// weights in this other region (default: reject other regions)",
    )


def _add_work(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-inflight",
        type=positive_int,
        metavar="N",
        help="limit concurrent requests in the engine (default: 4 times --max-num-seqs)",
    )
    add(
        "--max-held-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="limit the memory for requests and rows in transit (default: 64M)",
    )
    add(
        "--max-shards",
        type=positive_int,
        metavar="N",
        help="own up to N shards at a time, to order their lines by prefix (default: 32)",
    )
    add(
        "--flush-bytes",
        type=size_in_bytes,
        metavar="SIZE",
        help="write finished rows after this many bytes (default: 8M)",
    )
    add(
        "--max-attempts",
        type=positive_int,
        metavar="N",
        help="abandon a shard after N claims without a new row (default: 5)",
    )
    add(
        "--reuse",
        action="store_const",
        const="1",
        help="reuse results of a tenant's earlier batches, and store new ones (default: no)",
    )
    add(
        "--reuse-sampled",
        action="store_const",
        const="1",
        help="with --reuse: also reuse sampled results, each for an identical line in the same "
        "position (default: only results with temperature 0 or a seed)",
    )
    add(
        "--reuse-max-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="limit the results stored per tenant (default: 16G)",
    )
    add(
        "--health-file",
        metavar="PATH",
        help="touch this file every few seconds, for python -m tidemill.cli.health (default: none)",
    )


def _add_times(group: argparse._ArgumentGroup) -> None:
    for flag, words in (
        (
            "--flush-seconds",
            "write finished rows after this time (default: 2 to 8, depending on the batch size)",
        ),
        (
            "--lease-seconds",
            "let a shard's lease expire if not renewed for this long (default: 30)",
        ),
        (
            "--visibility-seconds",
            "redeliver a message if not renewed for this long (default: 60)",
        ),
        ("--wait-seconds", "wait this long for messages in an empty queue (default: 10)"),
        ("--start-seconds", "limit the time for loading an engine (default: 1800)"),
        ("--grace-seconds", "on SIGTERM, let requests run for this long (default: 20)"),
    ):
        group.add_argument(flag, metavar="SECONDS", help=words)
    group.add_argument(
        "--exit-when-idle",
        dest="exit_when_idle_seconds",
        nargs="?",
        const=_IDLE_SECONDS,
        metavar="SECONDS",
        help="exit after this long without work (default: never; without a number: "
        f"{_IDLE_SECONDS})",
    )
    group.add_argument(
        "--min-workers",
        metavar="N",
        help="keep at least N idle workers of the model (default: 0)",
    )
    group.add_argument(
        "--min-workers-hours",
        metavar="HOURS",
        help="keep them only during these UTC hours, e.g. 'Mon-Fri 07:00-18:00' (default: always)",
    )
