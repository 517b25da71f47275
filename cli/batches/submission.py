"""From a file on this machine to a batch: looked at, uploaded, made once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.api.client import Client
from cli.api.objects import Batch
from cli.api.server import Server
from cli.batches.check import Report, check_file
from cli.batches.outcome import print_json
from cli.batches.wait import Targets, bring_home
from cli.carrying.begun import Notes, notes_of
from cli.carrying.bytes_bar import bytes_shown
from cli.carrying.upload import upload_file
from cli.errors import BadInput, OutputLost, Stopped
from cli.files.source import Source
from cli.kinds import told_by_line
from cli.terminal import amount, plain, put, say
from engine.batchfile.lines import EXAMPLE_LINE
from handler.batch.model import OnInvalidLine


def look(
    server: Server | None, source: Source, on_invalid_line: OnInvalidLine, *, as_json: bool
) -> int:
    """Say what is in a file; 0 when a batch could be made of it, else BadInput is raised."""
    models = None
    if server is not None:
        with Client(server) as client:
            models = client.models()
    report = checked(source, models, on_invalid_line, as_json=as_json)
    if as_json:
        print_json(_fields_of(report))
    else:
        put("\n".join(_sentences(report, is_asked=models is not None)))
    return 0


def submit(
    server: Server,
    source: Source,
    endpoint: str | None,
    fields: Mapping[str, Any],
    targets: Targets | None,
    *,
    as_json: bool,
) -> int:
    """Make a batch of a file and return the exit status; with targets, wait and fetch its rows."""
    with Client(server) as client:
        report = checked(
            source, client.models(), fields.get("on_invalid_line", "fail"), as_json=as_json
        )
        path = Path(source.name) if _is_file(source) else None
        with notes_of(server, path) as notes:
            try:
                batch = _make(
                    client, source, {**fields, "endpoint": endpoint or report.endpoint}, notes
                )
            except Stopped as exc:
                kept = "the same command goes on where it was" if path else "no batch was made"
                raise Stopped(exc.signum, kept) from exc
            notes.forget()
        try:
            _tell_of(batch, targets, as_json=as_json)
        except OutputLost as exc:
            raise OutputLost(f"{exc}; the batch {batch.id} is made all the same") from exc
        if targets is not None:
            return bring_home(client, batch, targets, as_json=as_json)
    say(f"`tidemill resume {batch.id}` waits for it and fetches its rows")
    return 0


def checked(
    source: Source,
    models: Mapping[str, str] | None,
    on_invalid_line: OnInvalidLine,
    *,
    as_json: bool,
) -> Report:
    """Return what is in a file; raises BadInput that names every bad line, the first hundred."""
    size = os.fstat(source.file.fileno()).st_size
    with bytes_shown(f"checking {source.name}", size) as show:
        report = check_file(source.file, models=models, on_invalid_line=on_invalid_line, show=show)
    wrong = _wrong_with(report)
    if wrong:
        if as_json:
            print_json(_fields_of(report))
        told = (f"{source.name} cannot be a batch; nothing was uploaded:", *wrong)
        raise BadInput("\n".join(told))
    if report.failing.count:
        failing = f"{report.failing.count:,} of {amount(report.num_lines, report.form.unit)}"
        reasons = report.failing.told(report.form.unit)
        say("\n".join((f"warning: {failing} will get an error row:", *reasons)))
    return report


def _wrong_with(report: Report) -> list[str]:
    """Return why a file can be no batch, a sentence each; nothing when it can."""
    errors, unit = report.verdict.errors, report.form.unit
    named = told_by_line([(error.line, error.message) for error in errors], unit)
    if any(error.code == "missing_required_parameter" for error in errors):
        named.append(f"A line looks like this:\n{EXAMPLE_LINE}")
    if not errors and report.is_hopeless:
        lines = amount(report.num_lines, unit)
        return [f"none of its {lines} can run:", *report.failing.told(unit)]
    return named


def _tell_of(batch: Batch, targets: Targets | None, *, as_json: bool) -> None:
    """Print what was made; who waits for it prints each of its states, or rows and nothing else."""
    if as_json:
        if targets is None:
            print_json(batch.fields)
    elif targets is not None and targets.take_standard_output:
        say(f"{batch.id} is made")
    else:
        put(batch.id)


def _make(client: Client, source: Source, fields: Mapping[str, Any], notes: Notes) -> Batch:
    name = Path(source.name).name if _is_file(source) else "input.jsonl"
    file_id = upload_file(client, source.file, name, notes)
    asked = {"input_file_id": file_id, "completion_window": "24h", **fields}
    return client.create_batch(asked, notes.begun.idempotency_key(asked))


def _is_file(source: Source) -> bool:
    """Say whether it is read where it lies: what is no file has been copied to a nameless one."""
    try:
        return os.path.samestat(Path(source.name).stat(), os.fstat(source.file.fileno()))
    except OSError:
        return False


def _fields_of(report: Report) -> dict[str, Any]:
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
        "errors": [
            {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
            for error in report.verdict.errors
        ],
    }


def _sentences(report: Report, *, is_asked: bool) -> list[str]:
    tokens = f"about {amount(report.input_tokens, 'token')} in"
    if report.writes:
        tokens += f", at most {report.output_tokens:,} out"
    unlimited = f", {report.num_unlimited:,} requests name no limit" if report.num_unlimited else ""
    return [
        f"{amount(report.num_lines, 'line')}, {amount(report.num_bytes, 'byte')}",
        *(f"{name}: {amount(count, 'line')}" for name, count in sorted(report.endpoints.items())),
        *(
            f"model {plain(name) or '(none named)'}: {amount(count, 'line')}"
            for name, count in sorted(report.models.items())
        ),
        tokens + unlimited,
        ("nothing else is wrong with it" if report.failing.count else "nothing is wrong with it")
        + ("" if is_asked else ", as far as can be told without a server"),
    ]
