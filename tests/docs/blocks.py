"""Code blocks of Markdown pages, and the commands in blocks of a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("guides/*.md"))]
_BLOCK = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"[A-Z_]+=")


class Block(NamedTuple):
    """One block: its language, the name of the file that it shows, its text and first line."""

    language: str
    title: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[2], match[3] or "", dedent(match[4]), text.count("\n", 0, match.start()) + 1)
        for match in _BLOCK.finditer(text)
    ]


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block, without the variables before it.

    A command may extend over several lines, by a backslash or inside quotes.
    """
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            pending += "\n"
            continue
        pending = ""
        if words[:1] == ["export"]:
            words = words[1:]
        while words and _VARIABLE.match(words[0]):
            words = words[1:]
        if words:
            yield words
    assert not pending, f"an incomplete command: {pending}"
