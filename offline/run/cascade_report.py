"""Report of a cascade: its threshold, and a table that compares both models and the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tidemill.batch.calibration.report import FEW_GOLD_ROWS

from ..console.tables import columns
from ..console.terminal import amount

PARTS: Final = {
    "first": "first model, all rows",
    "first_escalated": "first model, escalated rows",
    "second": "second model, escalated rows",
    "cascade": "cascade",
}


def report_lines(cascade: Mapping[str, Any]) -> Iterator[str]:
    """Yield the threshold, and a table that compares both models and the cascade."""
    yield f"cascade of {' and '.join(map(str, cascade['models']))}:"
    yield from _threshold_lines(cascade)
    parts = cascade["parts"]
    names = [*parts["first"]["accuracy"]]
    has_cost = parts["first"]["cost"] is not None
    header = ("", "rows", "tokens", "seconds", *(["cost"] if has_cost else []), *names)
    rows = [header]
    for part, title in PARTS.items():
        found = parts[part]
        if not found["rows"]:
            continue
        num_tokens = found["prompt_tokens"] + found.get("completion_tokens", 0)
        cells = [title, f"{found['rows']:,}", f"{num_tokens:,}"]
        is_timed = "seconds" in found
        cells.append(f"{found['seconds'] + found['load_seconds']:,.1f}" if is_timed else "")
        if has_cost:
            cells.append("" if found.get("cost") is None else f"{found['cost']:,.4f}")
        rows.append((*cells, *(_accuracy(found["accuracy"].get(name)) for name in names)))
    if rows[1:]:
        yield from columns(rows)
    if cascade.get("escalation_failed"):
        count = amount(cascade["escalation_failed"], "row")
        yield f"{count} failed with the second model and kept the first model's answer:"
        for kind in cascade["escalation_errors"]:
            yield f"  {kind['count']:,} × {kind['message']}"
    if cascade["untimed_rows"]:
        yield f"time and cost exclude {amount(cascade['untimed_rows'], 'row')} of a stopped run"


def _threshold_lines(cascade: Mapping[str, Any]) -> Iterator[str]:
    gold = cascade["gold"]
    if gold is None:
        return
    target = cascade["settings"]["--target-accuracy"]
    rows = amount(gold["num_rows"], "gold row")
    if gold["value"] is None:
        yield f"no threshold reaches {target:.1%} on {rows}, so all rows were escalated"
    else:
        checked = gold["checked_accuracy"]
        shown = "no rows to check it on" if checked is None else f"{checked:.1%} cross-checked"
        yield (
            f"threshold {gold['value']:.4g}: accepts {gold['num_accepted']:,} of {rows} at "
            f"{gold['accuracy']:.1%} ({shown}; target {target:.1%})"
        )
        if checked is not None and checked < target:
            yield "the cross-checked accuracy is lower: add gold rows, or raise the target"
    if gold["num_rows"] < FEW_GOLD_ROWS:
        yield f"fewer than {FEW_GOLD_ROWS} gold rows: the threshold is uncertain"


def _accuracy(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else f"{found['accuracy']:.1%} of {found['gold_rows']:,}"
