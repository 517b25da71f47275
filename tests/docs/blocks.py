"""Pages whose blocks tests run, and the commands in blocks of a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from tools.docs_report import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("guides/*.md"))]
_VARIABLE = re.compile(r"[A-Z_]+=")


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
