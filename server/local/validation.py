"""Validation of an input file before any of it runs: its errors and number of rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.file.duplicate_ids import DuplicateFinder
from tidemill.batch.file.formats import HEAD_BYTES, detect_format, open_lines
from tidemill.batch.file.line_blocks import BLOCK_BYTES, CountedFile, LineBlocks
from tidemill.batch.file.lines import FormatError, read_lines
from tidemill.batch.model import Options
from tidemill.batch.validation import NOT_JSON, Findings, LineChecker, Verdict, judge, refuse

_MORE_NAMES = (
    "Use one of these, or start the server with more names (`--served-model-name`) or with "
    "`--any-model`."
)
# Engine threads never wait for the GIL longer than these lines take.
_LINES_PER_CHECKPOINT = 32


class CheckedFile(NamedTuple):
    """Result of a check; `blocks` is the index of the lines of a plain file."""

    verdict: Verdict
    findings: Findings
    blocks: LineBlocks | None = None


def check_file(
    path: Path,
    models: Mapping[str, str],
    options: Options,
    checkpoint: Callable[[], None],
    *,
    url: str | None = None,
) -> CheckedFile:
    """Return the verdict on a file, its findings, and the index of its lines if it is plain.

    `url` is the endpoint of requests that name none. `checkpoint` is called every few lines; its
    exceptions pass through.
    """
    findings = Findings()
    with (
        CountedFile(path) as counted,
        BufferedReader(counted, BLOCK_BYTES) as file,
        DuplicateFinder(path.parent) as finder,
    ):
        try:
            form = detect_format(file.read(HEAD_BYTES), url)
            checker = LineChecker(
                findings,
                models=models,
                endpoint=None,
                add_id=finder.add,
                more_names=_MORE_NAMES,
            )
            for raw in read_lines(open_lines(form, file)):
                checker.check(raw)
                if findings.num_rows % _LINES_PER_CHECKPOINT == 0:
                    time.sleep(0)  # yields the GIL to other threads
                    checkpoint()
        except FormatError as exc:
            return CheckedFile(refuse(NOT_JSON, exc.message), findings)
        duplicates = finder.find(MAX_LISTED_ERRORS, checkpoint)
    verdict = judge(
        findings,
        duplicates,
        mistake=form.suspicion,
        on_invalid_line=options.on_invalid_line,
        strict_parameters=options.strict_parameters,
        unit=form.unit,
    )
    return CheckedFile(verdict, findings, counted.blocks if form.is_plain else None)
