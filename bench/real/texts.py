"""Short English texts of this machine: paragraphs of docstrings in Python's standard library.

They are the same on every machine with the same version of Python. Nothing of them is committed.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SEED: Final = 1
MIN_CHARS, MAX_CHARS = 60, 250
_PROSE: Final = re.compile(r"[A-Z][A-Za-z0-9 ,;:.'\"()/-]+[.]")
_MIN_WORD_SHARE: Final = 0.9
_WORD: Final = re.compile(r"[(\"']?[A-Za-z][a-z'-]*[,;:.)\"']*|a|A|I|\d+[,.]?")
_SKIPPED: Final = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}


def sample_texts(count: int) -> list[str]:
    """Return a number of different texts, the same ones each time."""
    found = sorted(set(_texts(Path(sysconfig.get_path("stdlib")))))
    random.Random(SEED).shuffle(found)
    return found[:count]


def _texts(folder: Path) -> Iterator[str]:
    """Yield the paragraphs of prose of a suitable length in the docstrings of a folder."""
    for path in folder.rglob("*.py"):
        if _SKIPPED.isdisjoint(path.relative_to(folder).parts):
            for docstring in _docstrings(path):
                paragraphs = (" ".join(each.split()) for each in docstring.split("\n\n"))
                yield from filter(_is_prose, paragraphs)


def _docstrings(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_bytes())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def _is_prose(text: str) -> bool:
    """Return whether a text is an English sentence rather than code, a list or a table."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS or not _PROSE.fullmatch(text):
        return False
    words = text.split(" ")
    return sum(bool(_WORD.fullmatch(word)) for word in words) >= _MIN_WORD_SHARE * len(words)
