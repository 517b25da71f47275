"""Submission: checks a local file, uploads it and creates its batch exactly once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.batch.file.expected_tokens import UNTOLD_TOKENS, work_of
from tidemill.batch.file.lines import EXAMPLE_LINE
from tidemill.batch.file.unknown_parameters import sentences
from tidemill.offline.console.error_summary import sentences_by_line
from tidemill.offline.console.errors import BadInput, OutputLost, Stopped
from tidemill.offline.console.progress_bar import byte_progress
from tidemill.offline.console.terminal import (
    amount,
    duration,
    log,
    print_output,
    without_control_chars,
)
from tidemill.offline.extras import not_installed
from tidemill.offline.files.source import Source

from ..api.client import Client
from ..api.objects import Batch
from ..api.server import Server
from ..transfer.submission_state import StateFile, open_state_file
from ..transfer.upload import upload_file
from .file_check import COMPILER, FileReport, check_file, has_compiler
from .outcome import print_json
from .wait import Targets, wait_and_fetch


def dry_run(
    server: Server | None,
    source: Source,
    fields: Mapping[str, Any],
    *,
    as_json: bool,
    is_for_run: bool = False,
    has_warning: bool = False,
) -> FileReport:
    """Print a summary of a file and return its report; raise BadInput if it is not valid.

    With `is_for_run`, the file may be empty; a deployment rejects an empty file. `has_warning` says
    that a problem was already reported.
    """
    models, expected = None, None
    with Client(server) if server is not None else nullcontext() as client:
        if client is not None:
            models = client.models()
        report = check_source(source, models, fields, as_json=as_json, is_for_run=is_for_run)
        [model, *others] = report.models or [""]
        if client is not None and model and not others and not report.verdict.num_errors:
            expected = _time_and_cost(report, client.speed_of(model))
    if as_json:
        print_json(_fields_of(report) | (expected._asdict() if expected is not None else {}))
        return report
    has_server = models is not None
    lines = _sentences(report, has_server=has_server, has_warning=has_warning)
    if expected is not None:
        seconds, cost = expected
        priced = "" if cost is None else f", which costs about {cost:,.3g}"
        lines.insert(-1, f"about {duration(seconds)} of one worker{priced}")
    print_output("\n".join(lines))
    return report


class _TimeAndCost(NamedTuple):
    """Seconds of one worker, and their cost if there is a price."""

    estimated_seconds: float
    estimated_cost: float | None


def _time_and_cost(
    report: FileReport, speed: tuple[float, float | None] | None
) -> _TimeAndCost | None:
    """Return an estimate by the speed of a model's workers; None if it is unknown."""
    if speed is None:
        return None
    rate, cost_per_hour = speed
    output = report.output_tokens + UNTOLD_TOKENS * report.num_unlimited
    seconds = work_of(report.input_tokens, output) / rate
    cost = None if cost_per_hour is None else seconds / 3600 * cost_per_hour
    return _TimeAndCost(round(seconds, 1), cost)


def submit(
    server: Server,
    source: Source,
    endpoint: str | None,
    fields: Mapping[str, Any],
    targets: Targets | None,
    *,
    as_json: bool,
    filename: str | None = None,
    table: Source | None = None,
) -> Batch:
    """Submit a file and return its batch; with targets, wait and fetch its rows.

    The server lists the input as `filename`; the default is the source's name. A `table` is
    uploaded instead of its requests, which are the source.
    """
    with Client(server) as client:
        report = check_source(source, client.models(), fields, as_json=as_json)
        sent = table or source
        path = Path(sent.name) if _is_file(sent) else None
        with open_state_file(server, path) as state_file:
            try:
                requested = {**fields, "endpoint": endpoint or report.endpoint}
                batch = _make(client, sent, filename, requested, state_file)
            except Stopped as exc:
                outcome = "run the same command to resume" if path else "no batch was created"
                raise Stopped(exc.signum, outcome) from exc
            state_file.remove()
        try:
            report_created(batch, targets, as_json=as_json)
        except OutputLost as exc:
            raise OutputLost(f"{exc}; the batch {batch.id} was created anyway") from exc
        if targets is not None:
            return wait_and_fetch(client, batch, targets, as_json=as_json)
    log(f"wait for it and fetch its rows with `tidemill resume {batch.id}`")
    return batch


def check_source(
    source: Source,
    models: Mapping[str, str] | None,
    fields: Mapping[str, Any],
    *,
    as_json: bool,
    is_for_run: bool = False,
) -> FileReport:
    """Return the report on a file; raises BadInput with up to a hundred invalid lines.

    `fields` are the options of the batch.
    """
    size = os.fstat(source.file.fileno()).st_size
    with byte_progress(f"checking {source.name}", size) as show:
        report = check_file(
            source.file,
            models=models,
            on_invalid_line=fields.get("on_invalid_line", "fail"),
            strict_parameters=fields.get("strict_parameters", False),
            form=source.form,
            show=show,
        )
    wrong = _wrong_with(report)
    if is_for_run and any(error.code == "empty_file" for error in report.verdict.errors):
        log(
            f"note: {source.name} has no {report.form.unit}s: `tidemill run` writes an empty "
            "output, but a deployment rejects the file"
        )
    elif wrong:
        if as_json:
            print_json(_fields_of(report))
        outcome = "cannot be run" if is_for_run else "is not a valid batch; nothing was uploaded"
        message = (f"{source.name} {outcome}:", *wrong)
        raise BadInput("\n".join(message))
    if unknown := sentences(report.unknown, report.form.unit):
        log("\n".join(("warning: unknown parameters have no effect:", *unknown)))
    if report.failing.count:
        failing = f"{report.failing.count:,} of {amount(report.num_lines, report.form.unit)}"
        reasons = report.failing.sentences(report.form.unit)
        log("\n".join((f"warning: {failing} will get an error row:", *reasons)))
    if report.num_uncompiled:
        log(f"warning: {_why_uncompiled(report)}")
    return report


def _why_uncompiled(report: FileReport) -> str:
    lines = amount(report.num_uncompiled, report.form.unit)
    if has_compiler():
        return f"the constraints of {lines} were not checked: compiling the others took too long"
    missing = not_installed(f"checking the constraints of {lines}", [COMPILER], "engine")
    return str(missing)


def _wrong_with(report: FileReport) -> list[str]:
    """Return a sentence for each fault of a file; empty for a valid file."""
    errors, unit = report.verdict.errors, report.form.unit
    named = sentences_by_line([(error.line, error.message) for error in errors], unit)
    if any(error.code == "missing_required_parameter" for error in errors):
        named.append(f"Example of a valid line:\n{EXAMPLE_LINE}")
    if 0 < report.verdict.num_errors < report.num_lines and report.form.is_table:
        named.append("Correct them, or run the other rows: --on-invalid-line skip")
    if not errors and report.is_hopeless:
        lines = amount(report.num_lines, unit)
        return [f"none of its {lines} can run:", *report.failing.sentences(unit)]
    return named


def report_created(batch: Batch, targets: Targets | None, *, as_json: bool) -> None:
    """Print the id of the created batch, unless rows or JSON states are printed instead."""
    if as_json:
        if targets is None:
            print_json(batch.fields)
    elif targets is not None and targets.take_standard_output:
        log(f"{batch.id} was created")
    else:
        print_output(batch.id)


def _make(
    client: Client,
    source: Source,
    filename: str | None,
    fields: Mapping[str, Any],
    state_file: StateFile,
) -> Batch:
    file_id = upload_file(client, source.file, filename or _name_of(source), state_file)
    requested = {"input_file_id": file_id, "completion_window": "24h", **fields}
    return client.create_batch(requested, state_file.state.idempotency_key(requested))


def _name_of(source: Source) -> str:
    """Return the name of an input in the server's list: `reviews.csv.jsonl` for a table."""
    name = source.name.rstrip("/").rpartition("/")[2]
    if source.form is not None and source.form.is_table:
        return f"{name or 'table'}.jsonl"
    return name if _is_file(source) or "://" in source.name else "input.jsonl"


def _is_file(source: Source) -> bool:
    """Return whether the source is a file read in place, not a copied stream or download."""
    try:
        return os.path.samestat(Path(source.name).stat(), os.fstat(source.file.fileno()))
    except OSError:
        return False


def _fields_of(report: FileReport) -> dict[str, Any]:
    return {
        "object": "file.check",
        "bytes": report.num_bytes,
        "lines": report.num_lines,
        "endpoint": report.endpoint,
        "endpoints": dict(report.endpoints),
        "models": dict(report.models),
        "estimated_input_tokens": report.input_tokens,
        "max_output_tokens": None if report.num_unlimited else report.output_tokens,
        "num_errors": report.verdict.num_errors,
        "num_failing": report.failing.count,
        "num_uncompiled": report.num_uncompiled,
        "unknown_parameters": [asdict(each) for each in report.unknown.most_frequent()],
        "errors": [
            {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
            for error in report.verdict.errors
        ],
    }


def _sentences(report: FileReport, *, has_server: bool, has_warning: bool) -> list[str]:
    unit = report.form.unit
    tokens = f"about {amount(report.input_tokens, 'token')} in"
    if report.writes and report.output_tokens:
        tokens += f", at most {report.output_tokens:,} out"
    contents = f" of {report.form.contents}" if report.form.vendor else ""
    is_faulty = has_warning or report.failing.count or report.unknown.found or report.num_uncompiled
    unlimited = (
        f", {report.num_unlimited:,} requests without a limit" if report.num_unlimited else ""
    )
    return [
        f"{amount(report.num_lines, unit)}{contents}, {amount(report.num_bytes, 'byte')}",
        *(f"{name}: {amount(count, unit)}" for name, count in sorted(report.endpoints.items())),
        *(
            f"model {without_control_chars(name) or '(none named)'}: {amount(count, unit)}"
            for name, count in sorted(report.models.items())
        ),
        tokens + unlimited,
        ("no other problems found" if is_faulty else "no problems found")
        + ("" if has_server else " (not checked against a server)"),
    ]
