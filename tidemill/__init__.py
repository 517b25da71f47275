"""LLM batch inference in your own cloud.

In a checkout its packages are links to folders of the repository root (docs/adr/0001). Names are
loaded on first use: `import tidemill` alone loads nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sdk.commands import RunResult, run, submit
    from .sdk.engine import Engine
    from .sdk.errors import EngineDied, RequestFailed, TidemillError

    __version__: str

__all__ = ["Engine", "EngineDied", "RequestFailed", "RunResult", "TidemillError", "run", "submit"]

_MODULES = {
    **dict.fromkeys(("RunResult", "run", "submit"), "commands"),
    "Engine": "engine",
    **dict.fromkeys(("EngineDied", "RequestFailed", "TidemillError"), "errors"),
}


def __getattr__(name: str) -> object:
    """Import a name of the Python API, or look up the installed version."""
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("tidemill")
        except metadata.PackageNotFoundError:
            return "(not installed)"
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".sdk.{_MODULES[name]}", __name__), name)
