"""Flags that calibrate the decisions of a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final, Protocol

METHODS: Final = ("batch", "platt", "isotonic")
NAMES: Final = ("calibrate", "prior", "gold", "calibration")
"""Keys of a recipe, each with a flag of the same name."""


class _Group(Protocol):
    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action: ...


def add_calibration_flags(group: _Group) -> None:
    """Add the flags of a calibration."""
    add = group.add_argument
    add(
        "--calibrate",
        choices=METHODS,
        help="calibrate answers: batch (needs --prior), platt or isotonic (need "
        "--gold; default with --gold: platt)",
    )
    add(
        "--prior",
        action="append",
        metavar="PRIOR",
        help="with --calibrate batch: state the expected share of yes (0.3), of each "
        "option (a=0.5,b=0.3,c=0.2), or even; for one question 'QUESTION: PRIOR'",
    )
    add(
        "--gold",
        action="append",
        metavar="COLUMN",
        help="fit on the correct answers in this column (for one question "
        "QUESTION=COLUMN), or in this table with the --id and a column per "
        "question",
    )
    add(
        "--calibration",
        metavar="FILE",
        help="apply the .calibration.json of an earlier output",
    )


def calibration_keys(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of a recipe that the flags state."""
    given: dict[str, str | Sequence[str] | None] = {
        name: getattr(arguments, name) for name in NAMES
    }
    return {name: value for name, value in given.items() if value}
