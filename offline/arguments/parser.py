"""Argument parser with one-sentence usage errors, which suggest the nearest command or choices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..console.errors import Refused

_LIKENESS = 0.5
_REQUIRED = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises Refused instead of printing its usage and exiting.

    Destructive commands are never suggested for a mistyped one.
    """

    def __init__(self, *args: Any, is_destructive: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_destructive = is_destructive

    def error(self, message: str) -> NoReturn:
        """Raise Refused with the message and a pointer to `--help`."""
        message = message.removeprefix("argument ").removesuffix(".")
        if message.startswith(_REQUIRED):
            message = f"`{self.prog}` requires {message.removeprefix(_REQUIRED)}"
        message = message.replace("not allowed with argument", "cannot be combined with")
        raise Refused(f"{message}: see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error for a value that is not one of an action's choices."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - it has no public name
            raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(choices)}")
        near = get_close_matches(value.lower(), choices, n=1, cutoff=_LIKENESS)
        hint = f"see `{self.prog} --help`"
        if near and not getattr(action.choices[near[0]], "is_destructive", False):
            hint = f"did you mean `{self.prog} {near[0]}`?"
        raise Refused(f"`{self.prog}` has no command {value!r}: {hint}")


def add_tmp_dir_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag of the folder of temporary files."""
    group.add_argument(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="store temporary files here (default: the system's)",
    )


def expand_help(typed: Sequence[str]) -> Sequence[str]:
    """Expand `help`, `help COMMAND` and `version`, which are commands in other programs."""
    match typed:
        case ["help", *words]:
            return [*words, "--help"]
        case ["version"]:
            return ["--version"]
    return typed
