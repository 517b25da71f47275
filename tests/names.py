"""Lists ambiguous names of a package, and docstrings that start with a question word.

python -m tests.names [engine handler …]
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    *("net", "protocol", "batch", "engine", "engine_process", "handler", "server", "offline"),
    *("dashboard", "sdk", "cli", "infra", "localstack", "demo", "bench", "tools"),
)
# A docstring starts with the field's noun or a verb.
QUESTION = re.compile(r"(What|Who|Whose|Whom|Which|How|Where|When|Whether|Why)\b")
# Verbs that do not describe an action.
VAGUE = frozenset({"begin", "begun", "look", "of", "shown", "take", "taken", "tell", "told"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def modules(package: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield each module of a package by its path from the root."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if "node_modules" not in path.parts:
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def questions(package: str) -> Iterator[str]:
    """Yield the place of each public docstring that starts with a question word."""
    for path, tree in modules(package):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | Definition):
                continue
            line = 1 if isinstance(node, ast.Module) else node.lineno
            is_public = isinstance(node, ast.Module) or not node.name.startswith("_")
            if is_public and QUESTION.match(ast.get_docstring(node) or ""):
                yield f"{path}:{line}"


def vague(package: str) -> Iterator[str]:
    """Yield the place of each function with a vague name."""
    for path, tree in modules(package):
        for node in ast.walk(tree):
            if isinstance(node, Definition) and node.name.strip("_") in VAGUE:
                yield f"{path}:{node.lineno} {node.name}"


def shared_names(package: str) -> Iterator[str]:
    """Yield each name of several files, or of several public classes, with its places."""
    places = defaultdict(list)
    for path, tree in modules(package):
        if path.stem not in {"__init__", "__main__"}:
            places[f"{path.stem}.py"].append(str(path.parent))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{name}: {', '.join(found)}"


def main() -> None:
    """Print the lists of the given packages, or of all."""
    for package in sys.argv[1:] or PACKAGES:
        for title, found in (
            ("question", list(questions(package))),
            ("vague", list(vague(package))),
            ("shared", list(shared_names(package))),
        ):
            print(f"{package}: {title}: {len(found)}", *found, sep="\n  ")  # noqa: T201


if __name__ == "__main__":
    main()
