"""Why rows of a batch failed: errors of one kind told once."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import from_json

from cli.kinds import Kinds
from cli.terminal import amount, say
from engine.batchfile.rows import failure_in


def failures_in(path: Path) -> Kinds:
    """Return the failures among the rows of a file; what is no row is passed over."""
    kinds = Kinds()
    with path.open("rb") as file:
        for data in file:
            try:
                row = from_json(data)
            except ValueError:
                continue
            if isinstance(row, dict) and (message := failure_in(row)) is not None:
                kinds.add(message)
    return kinds


def tell_failures(kinds: Kinds, place: str | None = None) -> None:
    """Say why rows failed, and where they are; nothing where none did."""
    if kinds.count:
        where = f", in {place}" if place is not None else ""
        say("\n".join((f"{amount(kinds.count, 'row')} failed{where}:", *kinds.told())))
