"""The pass over the whole input before a model is loaded: every bad line is found and named."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cli.errors import BadInput
from cli.files.source import Source
from cli.terminal import amount, say
from engine.batchfile.duplicates import DuplicateFinder, Duplicates
from engine.batchfile.lines import LineError, parse_line, read_lines

MAX_NAMED = 100

_MAX_NAMED_DUPLICATES = 5
_LINES_PER_LOOK = 10_000
_SECONDS_PER_WORD = 5.0


@dataclass(frozen=True, slots=True)
class Checked:
    """What the pass found: how many lines get a row and how many are bad, the first named."""

    num_rows: int
    bad: tuple[str, ...]
    num_bad: int
    duplicates: Duplicates


def check_lines(source: Source, *, max_line_bytes: int, tmp_dir: Path | None) -> Checked:
    """Read the whole input once and return what is in it; memory stays flat."""
    num_rows = num_bad = 0
    bad: list[str] = []
    next_word = time.monotonic() + _SECONDS_PER_WORD
    source.file.seek(0)
    with DuplicateFinder(tmp_dir) as finder:
        for raw in read_lines(source.file, max_line_bytes=max_line_bytes):
            num_rows += 1
            try:
                line = parse_line(raw)
            except LineError as exc:
                num_bad += 1
                if len(bad) < MAX_NAMED:
                    bad.append(f"line {exc.line}: {exc.message}")
                continue
            finder.add(line.custom_id, line.number)
            if num_rows % _LINES_PER_LOOK == 0 and time.monotonic() >= next_word:
                say(f"checking {source.name}: {amount(num_rows, 'line')}")
                next_word = time.monotonic() + _SECONDS_PER_WORD
        return Checked(num_rows, tuple(bad), num_bad, finder.find(_MAX_NAMED_DUPLICATES))


def refuse_bad_lines(checked: Checked, name: str) -> None:
    """Raise BadInput that names every bad line, the first `MAX_NAMED` one by one."""
    if not checked.num_bad:
        return
    named = [f"  {words}" for words in checked.bad]
    if checked.num_bad > len(named):
        named.append(f"  and {amount(checked.num_bad - len(named), 'more line')}")
    raise BadInput(
        "\n".join(
            (
                f"{name} has {amount(checked.num_bad, 'malformed line')}; nothing was run:",
                *named,
                "Mend them, or give them an error row and run the rest: --on-invalid-line skip",
            )
        )
    )


def warn_of_duplicates(duplicates: Duplicates) -> None:
    """Say which lines repeat a custom_id; their rows can be told apart by their order only."""
    if not duplicates.count:
        return
    named = ", ".join(f"{line} (as line {first})" for line, first in duplicates.first)
    more = ", …" if duplicates.count > len(duplicates.first) else ""
    repeat = "line repeats" if duplicates.count == 1 else "lines repeat"
    say(f"warning: {duplicates.count:,} {repeat} a custom_id: {named}{more}")
