"""Values that all files of a folder share in a process, until its last test has ended.

A fixture of scope `package` would last until the end of the process, because the folders are not
packages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

_Value = TypeVar("_Value")

_OPEN: Final[dict[Path, tuple[ExitStack, Any]]] = {}


def shared(file: str, make: Callable[[], AbstractContextManager[_Value]]) -> _Value:
    """Return the value of the folder of this file, made if it does not exist."""
    folder = Path(file).parent
    if folder not in _OPEN:
        stack = ExitStack()
        _OPEN[folder] = stack, stack.enter_context(make())
    value: _Value = _OPEN[folder][1]
    return value


def close_unused(next_path: Path | None) -> None:
    """Close the values of all folders that do not contain the next test, if there is one."""
    for folder in list(_OPEN):
        if next_path is None or not next_path.is_relative_to(folder):
            stack, _ = _OPEN.pop(folder)
            stack.close()
