"""Flags of result reuse."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments.argument_types import S3Folder, local_or_s3_folder, size_in_bytes
from ..console.errors import Refused


def check_reuse(reuse: Path | S3Folder | None, max_size: int | None, *, sampled: bool) -> None:
    """Raise Refused for flags that require `--reuse` without it."""
    if reuse is None and (sampled or max_size is not None):
        raise Refused("--reuse-sampled and --reuse-max-size require --reuse")


def add_reuse_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of result reuse."""
    group.add_argument(
        "--reuse",
        type=local_or_s3_folder,
        metavar="FOLDER",
        help="reuse results of earlier runs from this folder or s3://bucket/prefix, and store new "
        "ones there",
    )
    group.add_argument(
        "--reuse-sampled",
        action="store_true",
        help="with --reuse: also reuse sampled results, each for an identical line in the same "
        "position (default: only results with temperature 0 or a seed)",
    )


def add_reuse_size_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for the size of stored results."""
    group.add_argument(
        "--reuse-max-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="with --reuse: remove the least recently used results above this size (default: 16G)",
    )
