"""Files of decided rows."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Final

from tidemill.batch.file.decided_row import DecidedRow

_BUFFER_BYTES: Final = 2**20


def read_decided(path: Path) -> Generator[DecidedRow]:
    """Read the rows of a file."""
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        yield from map(DecidedRow.parse, file)
