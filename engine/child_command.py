"""Command of a child process: a module of this package, on a safe path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

# Where `tidemill` lies; links are not followed, or it were another folder in a checkout.
_PATH: Final = str(Path(__file__).absolute().parents[2])
_RUN: Final = (
    "import sys; path, module = sys.argv[1:3]; del sys.argv[1:3]; "
    "path in sys.path or sys.path.insert(0, path); "
    "from runpy import run_module; run_module(module, run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package in a process of its own.

    With `-P` the working folder is not on the path: a `json.py` in it must not be imported. The
    package is the one of this process, installed or not, as both ends of a pipe are of one version.
    """
    return [sys.executable, "-P", "-c", _RUN, _PATH, module, *arguments]
