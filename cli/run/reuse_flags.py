"""Flags of results that are reused."""

from __future__ import annotations

import argparse

from ..arguments.argument_types import local_folder


def add_reuse_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags that say what is reused, and from where."""
    group.add_argument(
        "--reuse",
        type=local_folder,
        metavar="FOLDER",
        help="take the results of lines that an earlier run with this folder has answered; a run "
        "keeps its own in it",
    )
    group.add_argument(
        "--reuse-sampled",
        action="store_true",
        help="with --reuse: also of lines that another run may answer otherwise (default: of those "
        "with temperature 0 or a seed)",
    )
