"""Command of a child process: a module of this package, on a safe path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

# The folder that contains `tidemill`. Links are not resolved: in a checkout they lead elsewhere.
_PATH: Final = str(Path(__file__).absolute().parents[2])
_RUN: Final = (
    "import sys; path, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "path in sys.path or sys.path.insert(0, path); "
    "from runpy import run_module; run_module(module, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package in a separate process.

    With `-P` the working folder is not on the path, so a `json.py` in it is never imported. The
    child runs the same package as this process, so both ends of a pipe have the same version.
    """
    return [sys.executable, "-P", "-c", _RUN, _PATH, module, *arguments]
