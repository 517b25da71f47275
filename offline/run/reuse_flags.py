"""Flags of results that are reused."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments.argument_types import S3Folder, local_or_s3_folder, size_in_bytes
from ..console.errors import Refused


def check_reuse(reuse: Path | S3Folder | None, max_size: int | None, *, sampled: bool) -> None:
    """Refuse flags of `--reuse` without it."""
    if reuse is None and (sampled or max_size is not None):
        raise Refused("--reuse-sampled and --reuse-max-size need --reuse")


def add_reuse_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags that say what is reused, and from where."""
    group.add_argument(
        "--reuse",
        type=local_or_s3_folder,
        metavar="FOLDER",
        help="a folder or s3://bucket/prefix: reuse the results of lines that an earlier run with "
        "it has answered, and keep those of this run in it",
    )
    group.add_argument(
        "--reuse-sampled",
        action="store_true",
        help="with --reuse: also reuse sampled results, each for the same line at the same place "
        "(default: only results with temperature 0 or a seed)",
    )


def add_reuse_size_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag that bounds what is kept."""
    group.add_argument(
        "--reuse-max-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="with --reuse: remove results that were used longest ago above it (default: 16G)",
    )
