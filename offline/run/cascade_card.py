"""Run card of a cascade: the rows, tokens, time, cost and accuracy of both models and the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..console.terminal import log
from ..engine.engine import served_names
from ..files.cascade_files import CascadeFiles, Selection
from ..files.paths import card_path
from .cascade_report import PARTS
from .cascade_rows import Outcomes
from .run_card import as_json, as_markdown
from .run_options import RunOptions


def write_cascade_card(
    options: RunOptions, files: CascadeFiles, selection: Selection, outcomes: Outcomes
) -> dict[str, Any]:
    """Return the card of a finished cascade, and write it unless the options prevent that."""
    first, second = _card(files.first), _card(files.second) if selection.num_escalated else {}
    card = _card_of(options, selection, outcomes, first, second)
    if options.no_card:
        return card
    path = card_path(options.target)
    try:
        path.write_text(as_json(card), encoding="utf-8")
        if options.card_markdown:
            path.with_suffix(".md").write_text(as_markdown(card), encoding="utf-8")
        log(f"the run card is {path}")
    except OSError as exc:
        log(f"note: the run card cannot be written ({exc.strerror})")
    return card


def _card(rows: Path) -> dict[str, Any]:
    """Return the card of one model's run; empty without one."""
    try:
        card: dict[str, Any] = json.loads(card_path(rows).read_bytes())
    except (OSError, ValueError):
        return {}
    return card


def _seconds_by_cause(*cards: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the seconds of both runs by thread and cause."""
    total: dict[str, dict[str, float]] = {}
    for card in cards:
        for thread, causes in (card.get("seconds_by_cause") or {}).items():
            sums = total.setdefault(thread, {})
            for cause, seconds in causes.items():
                sums[cause] = sums.get(cause, 0.0) + seconds
    return total


def _card_of(
    options: RunOptions,
    selection: Selection,
    outcomes: Outcomes,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
) -> dict[str, Any]:
    completion_tokens = outcomes.first.completion_tokens + outcomes.second.completion_tokens
    total, cost = outcomes.cascade, [_cost(first), _cost(second)]
    seconds = sum(each.get("seconds") or 0.0 for each in (first, second))
    return {
        **first,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "input": options.input_file,
        "output": str(options.target),
        "rows": {
            **dict.fromkeys(("truncated", "kept", "reused", "not_run"), 0),
            "total": total.rows,
            "ok": total.rows - total.failed,
            "failed": total.failed,
        },
        "tokens": {
            "prompt": outcomes.first.prompt_tokens + outcomes.second.prompt_tokens,
            "cached": outcomes.first.cached_tokens + outcomes.second.cached_tokens,
            "completion": completion_tokens,
            "reasoning": 0,
        },
        "lengths": {"prompt": [], "completion": []},
        "errors": [*_errors(first, second)],
        "questions": outcomes.questions,
        "load_seconds": sum(each.get("load_seconds") or 0.0 for each in (first, second)),
        "seconds": round(seconds, 3),
        "seconds_by_cause": _seconds_by_cause(first, second),
        "rows_per_second": round(total.rows / seconds, 3) if seconds else None,
        "completion_tokens_per_second": round(completion_tokens / seconds, 3) if seconds else None,
        "cost": sum(cost) if options.price_per_hour is not None else None,
        "flags": [*options.typed_flags],
        "made_with": [*first.get("made_with", ()), *second.get("made_with", ())],
        "cascade": _cascade_of(options, selection, outcomes, first, second),
    }


def _cascade_of(
    options: RunOptions,
    selection: Selection,
    outcomes: Outcomes,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
) -> dict[str, Any]:
    assert options.cascade is not None
    parts = {name: getattr(outcomes, name).as_json() for name in PARTS}
    for name, cards in {"first": [first], "second": [second], "cascade": [first, second]}.items():
        parts[name] |= {
            "seconds": round(sum(each.get("seconds") or 0.0 for each in cards), 3),
            "load_seconds": round(sum(each.get("load_seconds") or 0.0 for each in cards), 3),
            "cost": None if options.price_per_hour is None else sum(map(_cost, cards)),
        }
    whole = parts["cascade"]
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        whole[name] = parts["first"][name] + parts["second"][name]
    resumed = sum((each.get("rows") or {}).get("kept", 0) for each in (first, second))
    return {
        "models": [served_names(options)[0], options.cascade.model],
        "settings": options.cascade.settings,
        "threshold": selection.threshold,
        "gold": selection.gold,
        "escalated": selection.num_escalated,
        "escalation_failed": outcomes.not_escalated.count,
        "escalation_errors": outcomes.not_escalated.kinds(),
        "untimed_rows": resumed,
        "parts": parts,
    }


def _cost(card: Mapping[str, Any]) -> float:
    return card.get("cost") or 0.0


def _errors(*cards: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for card in cards:
        yield from card.get("errors") or ()
