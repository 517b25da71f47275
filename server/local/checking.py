"""A file looked at before any of it runs: what is wrong with it, and how many rows it will have."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.batchfile.duplicates import DuplicateFinder
from engine.batchfile.forms import HEAD_BYTES, form_of, open_lines
from engine.batchfile.lines import FormError, read_lines
from handler.batch.check import NOT_JSON, Findings, LineChecker, Verdict, judge, refuse
from handler.batch.model import OnInvalidLine
from handler.batch.wire import MAX_LISTED_ERRORS

# Threads that run the model wait for no longer than so many lines take.
_LINES_PER_LOOK = 32


def check_file(
    path: Path,
    models: Mapping[str, str],
    on_invalid_line: OnInvalidLine,
    look: Callable[[], None],
) -> tuple[Verdict, Findings]:
    """Return what is wrong with a file, and what is in it.

    `look` is called every few lines; what it raises passes through.
    """
    findings = Findings()
    with path.open("rb") as file, DuplicateFinder(path.parent) as finder:
        try:
            form = form_of(file.read(HEAD_BYTES))
            checker = LineChecker(findings, models=models, endpoint=None, add_id=finder.add)
            for raw in read_lines(open_lines(form, file)):
                checker.check(raw)
                if findings.num_rows % _LINES_PER_LOOK == 0:
                    time.sleep(0)  # which lets other threads go on
                    look()
        except FormError as exc:
            return refuse(NOT_JSON, exc.message), findings
        duplicates = finder.find(MAX_LISTED_ERRORS, look)
    verdict = judge(
        findings,
        duplicates,
        mistake=form.suspicion,
        on_invalid_line=on_invalid_line,
        unit=form.unit,
    )
    return verdict, findings
