"""Batches as people read them: a table of many, the details of one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from cli.api import patience
from cli.batches.follow import rates
from cli.batches.outcome import errors_of, tokens_of
from cli.errors import ServerRefused
from cli.tables import columns
from cli.terminal import Colour, amount, duration, painted, plain, put, say

if TYPE_CHECKING:
    from cli.api.client import Client
    from cli.api.objects import Batch
    from cli.kinds import Kinds

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


Named = tuple["Batch", str]
"""A batch and what its file is called."""


def named(client: Client, batches: Sequence[Batch]) -> list[Named]:
    """Return batches with the names of their files; one whose file is gone goes by its id."""
    inputs = [str(batch.fields.get("input_file_id") or "") for batch in batches]
    uploaded = [name for name in inputs if name and not name.startswith(_DROPPED)]
    names = _names(client, uploaded)
    return [
        (batch, names.get(name) or _dropped_name(name))
        for batch, name in zip(batches, inputs, strict=True)
    ]


def _names(client: Client, file_ids: Sequence[str]) -> Mapping[str, str]:
    """Return what files are called that are still there: one is asked for by its id."""
    if len(file_ids) > 1:
        return client.input_names(file_ids)
    try:
        return {file_id: client.file(file_id).name for file_id in file_ids}
    except ServerRefused as exc:
        if exc.status == _NOT_FOUND:
            return {}
        raise


def _dropped_name(name: str) -> str:
    """Return a drop's key without what all have in common, and any other id as it is."""
    if not name.startswith(_DROPPED):
        return name
    return name.removeprefix(_DROPPED).partition("/")[2].removeprefix("input/")


def print_table(batches: Sequence[Named]) -> None:
    """Print a line for each batch on standard output, in columns."""
    if not batches:
        say("there are no batches: `tidemill submit FILE` makes one")
        return
    put("\n".join(columns([_HEADS, *(_cells(batch, file) for batch, file in batches)], _COLOURS)))


def watch_table(look: Callable[[], Sequence[Named]]) -> NoReturn:
    """Print the table again and again, until a signal ends it; on a terminal in its place."""
    while True:
        batches = look()
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[2J")
        print_table(batches)
        patience.pause(_WATCH_SECONDS)


def details(batch: Batch, file: str, failures: Kinds) -> list[str]:
    """Return what is known of one batch, a line each; `file` is what its input is called."""
    fields, beyond, usage = batch.fields, batch.beyond, batch.fields.get("usage") or {}
    pairs = [
        ("id", batch.id),
        ("status", batch.status),
        ("endpoint", fields.get("endpoint")),
        ("model", fields.get("model")),
        ("input", _input(fields.get("input_file_id"), file)),
        ("rows", f"{batch.completed:,} ok, {batch.failed:,} failed, of {batch.total:,}"),
        ("waits", _waiting(beyond.get("waiting"))),
        ("now", ", ".join(rates(fields)) if not batch.has_ended else None),
        ("audio", duration(beyond["audio_seconds"]) if beyond.get("audio_seconds") else None),
        ("tokens", tokens_of(usage)),
        ("cost", beyond.get("cost")),
        *((words, _time(fields[name])) for words, name in _TIMES if fields.get(name)),
        ("window", f"{fields.get('completion_window')}, until {_time(fields.get('expires_at'))}"),
        ("took", duration(beyond["seconds"]) if beyond.get("seconds") else None),
        ("output", batch.output_file_id),
        ("errors", batch.error_file_id),
        ("delivery", beyond.get("output_delivery")),
        ("webhook", _webhook(beyond.get("webhook"))),
        *((f"  {name}", value) for name, value in (fields.get("metadata") or {}).items()),
    ]
    width = max(len(name) for name, value in pairs if value)
    lines = [
        f"{name:<{width}}  {painted(plain(str(value)), _COLOURS.get(str(value)))}"
        for name, value in pairs
        if value
    ]
    return [*lines, *_failures(batch, failures), *(f"error: {words}" for words in errors_of(batch))]


def _input(file_id: str | None, file: str) -> str | None:
    if file_id is None or file == file_id or file_id.startswith(_DROPPED):
        return file_id
    return f"{file} ({file_id})"


def _failures(batch: Batch, failures: Kinds) -> list[str]:
    if not failures.count:
        return []
    is_part = failures.count < batch.failed
    rows = amount(failures.count, "row")
    which = f"the first {rows} of {batch.failed:,}" if is_part else rows
    return [f"why {which} failed:", *failures.told()]


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
    """Return how fast a batch goes, why it does not, or what was wrong with it."""
    if batch.has_ended:
        first, *others = errors_of(batch) or [""]
        more = f" (and {len(others):,} more)" if others else ""
        return f"{_shortened(first, _MOST_ERROR_CHARS)}{more}"
    waiting = batch.beyond.get("waiting")
    pace = ", ".join(rates(batch.fields))
    return pace if not waiting else ", ".join(filter(None, (pace, f"waits: {waiting['code']}")))


def _shortened(text: str, most_chars: int = _MOST_NAME_CHARS) -> str:
    """Return a long text without its middle: folders tell little, endings tell much."""
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
