"""Outcome of a batch: its exit status and its printed summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemill.offline.console.errors import ROWS_FAILED
from tidemill.offline.console.terminal import (
    amount,
    duration,
    log,
    print_output,
    without_control_chars,
)

if TYPE_CHECKING:
    from ..api.objects import Batch

_STATUS_OF_END = {"failed": 4, "expired": 5, "cancelled": 6}

EXIT_STATUSES = """\
exit status:
  0  success; with --wait: the batch is complete and every row succeeded
  1  failure: an invalid file, a server error, or an output that cannot be written
  2  invalid arguments or settings
  3  the batch is complete, but some rows failed
  4, 5, 6  the batch failed, expired or was cancelled
  7  the server cannot be reached, or its Retry-After is too long
  8  the server rejected the API key, or AWS the credentials
  128 + n  stopped by signal n (130: Ctrl-C); the batch continues
"""


def exit_status_of(batch: Batch) -> int:
    """Return the exit status of an ended batch."""
    if batch.status == "completed":
        return ROWS_FAILED if batch.failed else 0
    return _STATUS_OF_END[batch.status]


def log_end(batch: Batch) -> None:
    """Log how a batch ended, and its errors."""
    rows = f"{amount(batch.completed, 'row')} ok, {batch.failed:,} failed"
    words = [f"{batch.id} is {batch.status}: {rows}", *_figures(batch)]
    log(", ".join(words))
    if (table := batch.table_url) is not None:
        log(f"its table is at {table}")
    elif batch.is_table and batch.completed + batch.failed:
        log("it has no table: its rows do not contain the columns of the input")
    for error in errors_of(batch):
        log(f"  {error}")
    for sentence in unknown_parameters_of(batch):
        log(f"warning: {sentence}")


def errors_of(batch: Batch) -> list[str]:
    """Return a sentence for each error of a batch as a whole."""
    return [
        (f"line {error['line']}: " if error.get("line") else "")
        + without_control_chars(str(error.get("message")))
        for error in batch.errors
    ]


def unknown_parameters_of(batch: Batch) -> list[str]:
    """Return a sentence for each unknown parameter of a batch's lines."""
    from tidemill.batch.file.unknown_parameters import UnknownParameter

    listed = [
        UnknownParameter(*(each.get(name) for name in UnknownParameter.__slots__))
        for each in batch.extension.get("unknown_parameters") or ()
    ]
    return [without_control_chars(each.sentence()) for each in listed]


def wording_faults_of(batch: Batch) -> list[str]:
    """Return a sentence for each question whose labels are unlikely answers for most rows."""
    from tidemill.batch.table.question_counts import wording_fault

    faults = filter(None, map(wording_fault, batch.extension.get("questions") or ()))
    return [without_control_chars(fault) for fault in faults]


def _figures(batch: Batch) -> list[str]:
    usage, extension = batch.fields.get("usage") or {}, batch.extension
    figures = []
    if extension.get("truncated_rows"):
        figures.append(f"{extension['truncated_rows']:,} truncated")
    if extension.get("reused_rows"):
        figures.append(f"{extension['reused_rows']:,} reused")
    if extension.get("audio_seconds"):
        figures.append(f"{duration(extension['audio_seconds'])} of audio")
    if usage.get("total_tokens"):
        figures.append(tokens_of(usage, " tokens"))
    if extension.get("seconds"):
        figures.append(duration(extension["seconds"]))
    if cost := cost_words(extension):
        figures.append(f"cost {cost}")
    return figures


def tokens_of(usage: Mapping[str, Any], unit: str = "") -> str:
    """Return a batch's token counts; output tokens only when there are any."""
    tokens_in, out = f"{usage.get('input_tokens', 0):,}{unit} in", usage.get("output_tokens", 0)
    thought = (usage.get("output_tokens_details") or {}).get("reasoning_tokens", 0)
    tokens = f"{tokens_in}, {out:,} out" if out else tokens_in
    return f"{tokens} ({thought:,} reasoning)" if thought else tokens


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON value as a line of standard output."""
    import json

    from tidemill.batch.file.rows import SEPARATOR_ESCAPES

    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    print_output(text.translate(SEPARATOR_ESCAPES))


def cost_words(extension: Mapping[str, Any]) -> str:
    """Return `1.2`, or `1.2 of about 14` while the batch runs; empty without a price."""
    cost, estimated = extension.get("cost"), extension.get("estimated_cost")
    if estimated:
        return f"{cost or 0:,.4g} of about {estimated:,.4g}"
    return f"{cost:,.4g}" if cost else ""
