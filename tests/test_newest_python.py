"""The newest Python of a machine is found on PATH and among pyenv's versions."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.newest_python import NEWEST, newest_python


def add_python(path: Path, words: str) -> str:
    """Write a program that prints its minor version, as an interpreter does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{words}\n")
    path.chmod(0o755)
    return str(path)


def test_the_newest_that_starts_is_found(tmp_path: Path) -> None:
    """pyenv's shims do not start; untested newer versions are skipped."""
    environment = {"PATH": str(tmp_path / "shims"), "PYENV_ROOT": str(tmp_path)}
    assert newest_python(environment) is None
    versions = tmp_path / "versions"
    add_python(tmp_path / f"shims/python3.{NEWEST}", "echo command not found >&2; exit 127")
    add_python(versions / f"3.{NEWEST + 1}.0/bin/python", f"echo {NEWEST + 1}")
    assert newest_python(environment) is None
    newest = add_python(versions / f"3.{NEWEST}.0/bin/python", f"echo {NEWEST}")
    add_python(versions / "3.12.1/bin/python", "echo 12")
    assert newest_python(environment) == (None if sys.version_info.minor >= NEWEST else newest)
