"""A process whose imports are those of a plain `pip install tidemill`: no package of an extra.

As a program it reads a JSON array of command lines and prints, for each, a JSON object with its
exit status, standard error and, if it raised, the traceback.
"""

from __future__ import annotations

import io
import json
import sys
import tomllib
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def base_packages() -> set[str]:
    """Return the packages that the dependencies in pyproject.toml bring, without any extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pending, packages = [Requirement(line) for line in project["dependencies"]], set[str]()
    while pending:
        requirement = pending.pop()
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if name in packages or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        packages.add(name)
        pending += [Requirement(line) for line in metadata.requires(name) or ()]
    return packages


def modules_of_extras() -> set[str]:
    """Return the top-level modules that are installed here and that no base package has."""
    base = base_packages()
    return {
        module
        for module, packages in metadata.packages_distributions().items()
        if not base.intersection(map(canonicalize_name, packages)) and module != "tidemill"
    }


class BaseFinder:
    """The finder of installed modules, without those of the extras."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module is; None for one of an extra."""
        is_hidden = name.partition(".")[0] in cls.hidden
        return None if is_hidden else PathFinder.find_spec(name, path, target)


def hide_extras() -> None:
    """Make the modules of the extras impossible to find or import in this process."""
    BaseFinder.hidden = frozenset(modules_of_extras())
    for name in [name for name in sys.modules if name.partition(".")[0] in BaseFinder.hidden]:
        del sys.modules[name]
    finders: list[Any] = sys.meta_path
    finders[finders.index(PathFinder)] = BaseFinder


def result_of(arguments: list[str]) -> dict[str, Any]:
    """Run a command line and return its exit status, standard error and traceback."""
    from tidemill.cli.main import main

    status, raised, stderr = None, None, io.StringIO()
    with redirect_stderr(stderr), redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        try:
            status = main(arguments)
        except SystemExit as exc:
            status = exc.code
        except Exception:  # noqa: BLE001 - the result of the test
            raised = traceback.format_exc()
    return {"status": status, "stderr": stderr.getvalue(), "raised": raised}


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    hide_extras()
    from tidemill.offline.console import backoff

    backoff.sleep = lambda _seconds: None
    for command in commands:
        print(json.dumps(result_of(command)))  # noqa: T201 - read by the test
