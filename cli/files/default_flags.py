"""Flags of default parameters, for lines that do not set them."""

from __future__ import annotations

import argparse

from ..arguments.argument_types import nonblank_text, positive_int, temperature
from .defaults import Defaults


def add_default_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of default parameters."""
    add = group.add_argument
    add("--temperature", type=temperature, metavar="T", help="of sampling; 0 is greedy")
    add("--max-tokens", type=positive_int, metavar="N", help="the most tokens of an answer")
    add(
        "--system-prompt",
        type=nonblank_text,
        metavar="TEXT",
        help="put before conversations that have no system or developer message",
    )


def defaults_of(arguments: argparse.Namespace) -> Defaults:
    """Return the defaults of the parsed arguments."""
    return Defaults(arguments.temperature, arguments.max_tokens, arguments.system_prompt)
