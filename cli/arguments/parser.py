"""The argument parser: a usage error is one sentence, with the nearest command or the choices."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn

from ..console.errors import Refused

_LIKENESS = 0.5
_REQUIRED = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises Refused instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise Refused with the message and where to read more."""
        message = message.removeprefix("argument ").removesuffix(".")
        if message.startswith(_REQUIRED):
            message = f"`{self.prog}` needs {message.removeprefix(_REQUIRED)}"
        message = message.replace("not allowed with argument", "cannot be given together with")
        raise Refused(f"{message}: see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise for a value that is not among an action's choices."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - it has no public name
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(choices)}")
        near = get_close_matches(value.lower(), choices, n=1, cutoff=_LIKENESS)
        hint = f"did you mean `{self.prog} {near[0]}`?" if near else f"see `{self.prog} --help`"
        raise Refused(f"`{self.prog}` has no command {value!r}: {hint}")
