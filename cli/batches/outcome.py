"""How a batch ended: the exit status that tells it, and the words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cli.errors import ROWS_FAILED
from cli.terminal import amount, duration, plain, put, say

if TYPE_CHECKING:
    from cli.api.objects import Batch

_STATUS_OF_END = {"failed": 4, "expired": 5, "cancelled": 6}

EXIT_STATUSES = """\
exit status:
  0  done; a batch that was waited for is complete and every row is good
  1  it failed: a bad file, a refusal of the server, an output that cannot be written
  2  arguments or settings that cannot work
  3  the batch is complete, but some of its rows are errors
  4, 5, 6  the batch has failed, expired, been cancelled
  7  the server cannot be reached, or asks to wait for too long
  8  the server does not accept the key, or AWS the credentials
  128 + n  stopped by signal n (130: Ctrl-C); a batch goes on
"""


def exit_status_of(batch: Batch) -> int:
    """Return the exit status for a batch that has ended."""
    if batch.status == "completed":
        return ROWS_FAILED if batch.failed else 0
    return _STATUS_OF_END[batch.status]


def tell_end(batch: Batch) -> None:
    """Say how a batch ended, and what was wrong with it."""
    rows = f"{amount(batch.completed, 'row')} ok, {batch.failed:,} failed"
    words = [f"{batch.id} is {batch.status}: {rows}", *_figures(batch)]
    say(", ".join(words))
    for error in errors_of(batch):
        say(f"  {error}")


def errors_of(batch: Batch) -> list[str]:
    """Return what was wrong with a batch as a whole, a sentence each."""
    return [
        (f"line {error['line']}: " if error.get("line") else "") + plain(str(error.get("message")))
        for error in batch.errors
    ]


def _figures(batch: Batch) -> list[str]:
    usage, beyond = batch.fields.get("usage") or {}, batch.beyond
    figures = []
    if beyond.get("audio_seconds"):
        figures.append(f"{duration(beyond['audio_seconds'])} of audio")
    if usage.get("total_tokens"):
        figures.append(tokens_of(usage, " tokens"))
    if beyond.get("seconds"):
        figures.append(duration(beyond["seconds"]))
    if beyond.get("cost"):
        figures.append(f"cost {beyond['cost']:,.4g}")
    return figures


def tokens_of(usage: Mapping[str, Any], unit: str = "") -> str:
    """Return a batch's tokens; where none are generated, none are told of."""
    tokens_in, out = f"{usage.get('input_tokens', 0):,}{unit} in", usage.get("output_tokens", 0)
    thought = (usage.get("output_tokens_details") or {}).get("reasoning_tokens", 0)
    told = f"{tokens_in}, {out:,} out" if out else tokens_in
    return f"{told} ({thought:,} reasoning)" if thought else told


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON value as a line of standard output."""
    import json

    put(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
