"""Table of many batches, one per line, and the details of a single batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from tidemill.offline.console import backoff
from tidemill.offline.console.errors import ServerRefused
from tidemill.offline.console.tables import columns
from tidemill.offline.console.terminal import (
    Colour,
    amount,
    coloured,
    duration,
    log,
    print_output,
    without_control_chars,
)

from .follow import rates
from .outcome import (
    cost_words,
    errors_of,
    tokens_of,
    unknown_parameters_of,
    wording_faults_of,
)

if TYPE_CHECKING:
    from tidemill.offline.console.error_summary import ErrorSummary

    from ..api.client import Client
    from ..api.objects import Batch

_HEADS = ("ID", "FILE", "STATUS", "ROWS", "FAILED", "MODEL", "AGE", "")
_WATCH_SECONDS = 5.0
_DROPPED = "s3://"
_NOT_FOUND = 404
_MOST_NAME_CHARS = 40
_MOST_ERROR_CHARS = 100
_COLOURS: Mapping[str, Colour] = {
    "completed": "green",
    "failed": "red",
    "expired": "red",
    "cancelling": "yellow",
    "cancelled": "yellow",
    "validating": "blue",
    "in_progress": "blue",
    "finalizing": "blue",
}
_DAY_SECONDS = 24 * 3600
_TIMES = (
    ("created", "created_at"),
    ("began", "in_progress_at"),
    ("completed", "completed_at"),
    ("failed", "failed_at"),
    ("expired", "expired_at"),
    ("cancelled", "cancelled_at"),
)


NamedBatch = tuple["Batch", str]
"""A batch and the name of its input file."""


def with_file_names(client: Client, batches: Sequence[Batch]) -> list[NamedBatch]:
    """Return batches with the names of their input files, or `erased` for a missing file."""
    inputs = [str(batch.fields.get("input_file_id") or "") for batch in batches]
    uploaded = [name for name in inputs if name and not name.startswith(_DROPPED)]
    names = _names(client, uploaded)
    return [
        (batch, names.get(name) or _dropped_name(name) or "erased")
        for batch, name in zip(batches, inputs, strict=True)
    ]


def _names(client: Client, file_ids: Sequence[str]) -> Mapping[str, str]:
    """Return the names of files that still exist, by id."""
    if len(file_ids) > 1:
        return client.input_names(file_ids)
    try:
        return {file_id: client.file(file_id).name for file_id in file_ids}
    except ServerRefused as exc:
        if exc.status == _NOT_FOUND:
            return {}
        raise


def _dropped_name(name: str) -> str:
    """Return a drop's key without bucket and `input/`; other ids unchanged."""
    if not name.startswith(_DROPPED):
        return name
    return name.removeprefix(_DROPPED).partition("/")[2].removeprefix("input/")


def print_table(batches: Sequence[NamedBatch]) -> None:
    """Print the table of batches on standard output."""
    if not batches:
        log("there are no batches (of this key's tenant): create one with `tidemill submit FILE`")
        return
    print_output(
        "\n".join(columns([_HEADS, *(_cells(batch, file) for batch, file in batches)], _COLOURS))
    )


def watch_table(fetch: Callable[[], Sequence[NamedBatch]]) -> NoReturn:
    """Print the table again and again until a signal arrives, clearing a terminal each time."""
    while True:
        batches = fetch()
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[2J")
        print_table(batches)
        backoff.sleep(_WATCH_SECONDS)


def details(batch: Batch, file: str, failures: ErrorSummary) -> list[str]:
    """Return the details of a batch, one per line; `file` is the name of its input."""
    fields, extension, usage = batch.fields, batch.extension, batch.fields.get("usage") or {}
    pairs = [
        ("id", batch.id),
        ("status", batch.status),
        ("endpoint", fields.get("endpoint")),
        ("model", fields.get("model")),
        ("input", _input(fields.get("input_file_id"), file)),
        ("rows", f"{batch.completed:,} ok, {batch.failed:,} failed, of {batch.total:,}"),
        ("truncated", _truncated(extension.get("truncated_rows"))),
        ("waits", _waiting(extension.get("waiting"))),
        ("now", ", ".join(rates(fields)) if not batch.has_ended else None),
        ("audio", duration(extension["audio_seconds"]) if extension.get("audio_seconds") else None),
        ("tokens", tokens_of(usage)),
        ("cost", cost_words(extension)),
        *((words, _time(fields[name])) for words, name in _TIMES if fields.get(name)),
        ("window", f"{fields.get('completion_window')}, until {_time(fields.get('expires_at'))}"),
        ("priority", extension.get("priority")),
        ("took", duration(extension["seconds"]) if extension.get("seconds") else None),
        ("output", batch.output_file_id),
        ("errors", batch.error_file_id),
        ("delivery", extension.get("output_delivery")),
        ("webhook", _webhook(extension.get("webhook"))),
        *((f"  {name}", value) for name, value in (fields.get("metadata") or {}).items()),
    ]
    width = max(len(name) for name, value in pairs if value)
    lines = [
        f"{name:<{width}}  {coloured(without_control_chars(str(value)), _COLOURS.get(str(value)))}"
        for name, value in pairs
        if value
    ]
    warnings = (*unknown_parameters_of(batch), *wording_faults_of(batch))
    errors = [f"error: {words}" for words in errors_of(batch)]
    return [
        *lines,
        *_failures(batch, failures),
        *(f"warning: {words}" for words in warnings),
        *errors,
    ]


def _input(file_id: str | None, file: str) -> str | None:
    if file_id is None or file == file_id or file_id.startswith(_DROPPED):
        return file_id
    return f"{file} ({file_id})"


def _failures(batch: Batch, failures: ErrorSummary) -> list[str]:
    if not failures.count:
        return []
    is_part = failures.count < batch.failed
    rows = amount(failures.count, "row")
    which = f"the first {rows} of {batch.failed:,}" if is_part else rows
    return [f"why {which} failed:", *failures.sentences()]


def _truncated(num_rows: int | None) -> str | None:
    return f"{num_rows:,} of the successful rows (finish reason `length`)" if num_rows else None


def _waiting(waiting: dict[str, Any] | None) -> str | None:
    return f"since {_time(waiting['since'])}: {waiting['message']}" if waiting else None


def _webhook(webhook: dict[str, str] | None) -> str | None:
    return f"{webhook['status']} at {webhook['host']}" if webhook else None


def _cells(batch: Batch, file: str) -> tuple[str, ...]:
    done = f"{batch.completed + batch.failed:,}"
    return (
        batch.id,
        _shortened(file),
        batch.status,
        f"{done}/{batch.total:,}" if batch.total else "",
        f"{batch.failed:,}" if batch.failed else "",
        str(batch.fields.get("model") or ""),
        _age(batch.fields.get("created_at")),
        _now(batch),
    )


def _now(batch: Batch) -> str:
    """Return a running batch's rates and reason for waiting, or an ended batch's errors."""
    if batch.has_ended:
        first, *others = errors_of(batch) or [""]
        more = f" (and {len(others):,} more)" if others else ""
        num_truncated = batch.extension.get("truncated_rows")
        truncated = f"{num_truncated:,} truncated" if num_truncated else ""
        words = f"{_shortened(first, _MOST_ERROR_CHARS)}{more}"
        return ", ".join(filter(None, (words, truncated)))
    waiting = batch.extension.get("waiting")
    pace = ", ".join(rates(batch.fields))
    return pace if not waiting else ", ".join(filter(None, (pace, f"waits: {waiting['code']}")))


def _shortened(text: str, most_chars: int = _MOST_NAME_CHARS) -> str:
    """Shorten a long text in its middle, because the end of a path is the most useful part."""
    if len(text) <= most_chars:
        return text
    half = (most_chars - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _age(created_at: int | None) -> str:
    if created_at is None:
        return ""
    seconds = max(0.0, time.time() - created_at)
    return duration(seconds) if seconds < 2 * _DAY_SECONDS else f"{seconds // _DAY_SECONDS:,.0f} d"


def _time(seconds: int | None) -> str:
    if seconds is None:
        return "?"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
