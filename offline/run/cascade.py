"""Cascade: one model decides all rows, then a second one those of which the first is least sure.

Both are separate runs, with their rows in a folder next to the output: `--resume` continues
each of them, and repeats the steps between and after them, which depend only on the rows.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final

from tidemill.protocol.contract import Served

from ..console.errors import ROWS_FAILED, InputChanged, Refused
from ..console.terminal import amount, log
from ..engine.engine import Load, load_engine
from ..files.cascade_files import CascadeFiles, Selection
from ..files.recorded_run import card_of_output
from ..files.row_settings import differences, refusal
from .cascade_card import write_cascade_card
from .cascade_check import check_cascade, second_model
from .cascade_report import report_lines
from .cascade_rows import OpenTable, merge, select
from .job import run_job
from .run_options import RunOptions

_SIGNALS: Final = 128


def run_cascade(
    options: RunOptions, *, load: Load[Served] = load_engine, has_guard: bool = False
) -> int:
    """Run both models and return the exit status of the whole, as `run_job` does.

    Raises CliError before anything is run for unsuitable options.
    """
    assert options.cascade is not None
    options = _with_models(options)
    files = CascadeFiles.of(options.target)
    selection = None
    if not options.resume:
        _refuse_earlier(options, files)
    elif files.has_rows:
        settings, selection = files.load()
        _check_settings(options, settings)
    elif options.target.exists():
        return _check_complete(options)
    check_cascade(options)
    if not options.resume:
        files.remove()
    run = partial(run_job, load=load, has_guard=has_guard)
    with ExitStack() as stack:
        stack.callback(files.remove_if_empty)
        return _run(options, files, selection, OpenTable.of(options, stack), run)


def _run(
    options: RunOptions,
    files: CascadeFiles,
    selection: Selection | None,
    opened: OpenTable,
    run: Callable[[RunOptions], int],
) -> int:
    """Run both stages and the steps between and after them, and return the exit status."""
    assert options.cascade is not None
    files.save(options.cascade.settings, selection)
    if (status := run(_first_stage(options, files))) > _SIGNALS:
        return status
    if selection is None:
        selection = select(options, files, opened)
        files.save(options.cascade.settings, selection)
    log(_escalation(options, selection))
    if selection.num_escalated:
        _free_device()
        if (status := run(_second_stage(options, files))) > _SIGNALS:
            return status
    return _finish(options, files, selection, opened)


def _finish(
    options: RunOptions, files: CascadeFiles, selection: Selection, opened: OpenTable
) -> int:
    """Write the output and its card, and remove the folder unless a retry may need it."""
    assert options.cascade is not None
    outcomes = merge(options, files, selection, opened)
    card = write_cascade_card(options, files, selection, outcomes)
    log("\n".join(report_lines(card["cascade"])))
    if changed := opened.changed():
        raise InputChanged(changed)
    if outcomes.second.failed:
        log(
            f"to rerun the {amount(outcomes.second.failed, 'row')} that failed with "
            f"{options.cascade.model}, pass --resume --retry-failed (the finished rows are in "
            f"{files.folder})"
        )
    else:
        files.remove()
    failed = outcomes.cascade.failed
    is_failure = options.fail_on_error or failed == selection.num_rows
    return ROWS_FAILED if failed and is_failure else 0


def _with_models(options: RunOptions) -> RunOptions:
    """Return the options with a table whose output names the model of each row."""
    if options.table is None:
        return options
    recipe = replace(options.table.recipe, has_models=True)
    return replace(options, table=replace(options.table, recipe=recipe))


def _first_stage(options: RunOptions, files: CascadeFiles) -> RunOptions:
    return replace(
        options,
        cascade=None,
        stage="first",
        output_file=str(files.first),
        retry_failed=False,
        retry_truncated=False,
        fail_on_error=False,
        force=False,
        no_card=False,
        card_markdown=False,
    )


def _second_stage(options: RunOptions, files: CascadeFiles) -> RunOptions:
    return replace(
        _first_stage(second_model(options), files),
        stage="second",
        input_file=str(files.requests),
        output_file=str(files.second),
        table=None,
        on_invalid_line="skip",
        retry_failed=options.retry_failed,
    )


def _escalation(options: RunOptions, selection: Selection) -> str:
    assert options.cascade is not None
    rows = f"{selection.num_escalated:,} of {amount(selection.num_rows, 'row')}"
    below = "" if selection.threshold is None else f" below {selection.threshold:.4g}"
    why = f"with a confidence{below}" if below else "because no threshold reaches the accuracy"
    return f"escalating {rows} to {options.cascade.model}, {why}"


def _free_device() -> None:
    """Return the memory of the first model to the device, where the second one needs it."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _refuse_earlier(options: RunOptions, files: CascadeFiles) -> None:
    """Raise Refused for rows that would be lost."""
    if options.retry_failed or options.retry_truncated or options.allow_other_settings:
        raise Refused("--retry-failed, --retry-truncated and --allow-other-settings need --resume")
    if options.force:
        return
    if files.has_rows:
        raise Refused(
            f"{files.folder} contains finished rows of a stopped run: pass --resume to keep them "
            "and run the rest, or --force to start over"
        )
    if options.target.exists():
        raise Refused(
            f"{options.target} already exists: choose another file, or pass --force to overwrite it"
        )


def _check_settings(options: RunOptions, earlier: Mapping[str, Any]) -> None:
    assert options.cascade is not None
    if found := differences(earlier, options.cascade.settings):
        raise Refused(refusal(options.target, found))


def _check_complete(options: RunOptions) -> int:
    """Return 0 for a complete output of this cascade; raises Refused for any other."""
    cascade = (card_of_output(options.target) or {}).get("cascade")
    if cascade is None:
        raise Refused(
            f"{options.target} has no run card of a cascade: choose another file, or start over "
            "with --force without --resume"
        )
    _check_settings(options, cascade["settings"])
    log(f"{options.target} is complete: nothing to run")
    return 0
