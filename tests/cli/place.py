"""A deployment's table on an emulator, and its commands typed."""

from __future__ import annotations

import re

import pytest

from tests.emulators import Emulator
from tidemill.cli.main import main


def table_on(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a table in the account that this process has credentials of."""
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TIDEMILL_TABLE", raising=False)
    return emulator.create().table


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command; return its exit status and output."""
    status = main(arguments)
    output = capsys.readouterr()
    return status, output.out, output.err


def cells_of(table: str) -> list[list[str]]:
    """Return the cells of a table, its rows in order."""
    return [re.split(r" {2,}", row) for row in table.splitlines()]
