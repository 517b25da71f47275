"""Run card: a record of a run next to its output, as JSON, and as Markdown on request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tidemill.protocol.contract import EngineInfo

from ..console.errors import failure_of
from ..console.terminal import amount, duration, log
from ..files.output import LocalFile
from ..files.paths import card_path
from ..files.row_settings import SettingsUse, use_lines
from ..files.row_writer import OutputFiles
from .run_options import RunOptions
from .tally import Tally

if TYPE_CHECKING:
    from tidemill.batch.table.recipe import Recipe

    from .run import Run

_NOT_SETTINGS = frozenset(
    {
        *("input_file", "output_file", "error_file", "output_tmp_dir", "weights_cache", "table"),
        *("cascade", "stage"),
        *("model", "enable_metrics", "host", "port", "price_per_hour", "no_card", "shard"),
        *("card_markdown", "typed_flags", "force"),
        *("resume", "retry_failed", "retry_truncated", "allow_other_settings"),
    }
)
_BAR_CHARS = 30
_BAR = "█"


def write_card(run: Run, files: OutputFiles, tally: Tally) -> bool:
    """Write the card of a finished run; return whether the output has one.

    A run that added no rows keeps the earlier run's card. A failure is only logged, because the
    rows are complete.
    """
    try:
        return _write_card(run, files, tally)
    except Exception as exc:  # noqa: BLE001 - every row is in the output
        reason = exc.strerror if isinstance(exc, OSError) else failure_of(exc)
        log(f"note: the run card cannot be written ({reason})")
        return False


def _write_card(run: Run, files: OutputFiles, tally: Tally) -> bool:
    options = run.options
    if options.no_card or not isinstance(files.output, LocalFile):
        return False
    target = options.target
    has_run = not options.resume or tally.answered or tally.reused or run.record.is_pending
    path = card_path(target)
    if not has_run and path.exists():
        return True
    card = card_of(run, tally, run.metrics.info, str(target))
    path.write_text(as_json(card), encoding="utf-8")
    markdown = path.with_suffix(".md")
    if options.card_markdown:
        markdown.write_text(as_markdown(card), encoding="utf-8")
    if options.stage is not None:
        return True
    log(f"the run card is {path}" + (f" and {markdown}" if options.card_markdown else ""))
    return True


def card_of(run: Run, tally: Tally, info: EngineInfo | None, output: str) -> dict[str, Any]:
    """Return the card; tokens, lengths, rates and cost cover only rows that this run answered."""
    options, usage = run.options, tally.usage
    seconds = tally.seconds if tally.answered else 0.0
    cost = None
    if options.price_per_hour is not None:
        cost = options.price_per_hour * (seconds + tally.load_seconds) / 3600
    return {
        "object": "run.card",
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "input": run.requests.source.name,
        "output": output,
        "shard": None if options.shard is None else str(options.shard),
        "rows": {
            "total": tally.num_rows,
            "ok": tally.rows_done - tally.rows_failed,
            "failed": tally.rows_failed,
            "truncated": tally.truncated,
            "kept": tally.kept - tally.reused,
            "reused": tally.reused,
            "not_run": tally.num_not_run,
        },
        "tokens": {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "completion": usage.completion_tokens,
            "reasoning": usage.reasoning_tokens,
        },
        "lengths": {
            "prompt": tally.prompt_lengths.bins(),
            "completion": tally.completion_lengths.bins(),
        },
        "errors": tally.failures.kinds(),
        "questions": tally.questions,
        "load_seconds": round(tally.load_seconds, 3),
        "seconds": round(seconds, 3),
        "seconds_by_cause": {
            name: {cause: round(value, 3) for cause, value in causes.items()}
            for name, causes in tally.seconds_by_cause.items()
        },
        "rows_per_second": round(tally.answered / seconds, 3) if seconds else None,
        "completion_tokens_per_second": (
            round(usage.completion_tokens / seconds, 3) if seconds else None
        ),
        "cost": cost,
        "model": None if info is None else _model_fields(info),
        "flags": [*options.typed_flags],
        "settings": _settings(options),
        "made_with": run.record.rows.as_list(),
        "recipe": None if options.table is None else _recipe_fields(options.table.recipe),
    }


def as_json(card: Mapping[str, Any]) -> str:
    """Return the card as JSON."""
    return json.dumps(card, ensure_ascii=False, indent=2, default=str) + "\n"


def as_markdown(card: Mapping[str, Any]) -> str:
    """Return the card as Markdown: facts, errors, and histograms of token counts."""
    parts = [f"# {card['input']}\n", _table(_facts(card))]
    if card["errors"]:
        parts += ["\n## Errors\n"]
        parts += [f"- {kind['count']:,} × {kind['message']}" for kind in card["errors"]]
    if causes := card.get("seconds_by_cause"):  # cards of earlier versions have none
        parts += ["\n## Time\n", *_time_table(causes)]
    for name, title in (("prompt", "Prompt tokens"), ("completion", "Completion tokens")):
        if card["lengths"][name]:
            parts += [f"\n## {title}\n```", *_plot(card["lengths"][name]), "```"]
    parts += _decision_parts(card)
    for name in ("settings", "recipe"):
        if card[name]:
            text = json.dumps(card[name], ensure_ascii=False, indent=2, default=str)
            parts.append(f"\n## {name.capitalize()}\n```json\n{text}\n```")
    uses = [SettingsUse(each["settings"], each["rows"]) for each in card["made_with"]]
    if len(uses) > 1:
        parts += ["\n## Rows with different settings\n"]
        parts += [f"- {each}" for each in use_lines(uses)]
    return "\n".join(parts) + "\n"


def _decision_parts(card: Mapping[str, Any]) -> list[str]:
    """Return the parts about decisions, which few runs make: imports are late."""
    parts: list[str] = []
    if card["questions"]:
        from .question_report import question_lines

        parts += question_lines(card["questions"], card["recipe"])
    if reports := card.get("calibration"):
        from .question_report import calibration_lines

        parts.append("\n## Calibration")
        parts += [line for report in reports for line in calibration_lines(report)]
    if (cascade := card.get("cascade")) is not None:
        from .cascade_report import report_lines

        parts += ["\n## Cascade\n```", *report_lines(cascade), "```"]
    return parts


def _facts(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows, tokens, model = card["rows"], card["tokens"], card["model"]
    facts = [("output", card["output"])]
    if card["shard"]:
        facts.append(("part", card["shard"]))
    truncated = f" ({rows['truncated']:,} truncated)" if rows["truncated"] else ""
    words = [
        f"{amount(rows['total'], 'row')}: {rows['ok']:,} ok{truncated}, {rows['failed']:,} failed"
    ]
    words += [
        f"{rows[name]:,} {shown}"
        for name, shown in (("kept", "kept"), ("reused", "reused"), ("not_run", "not run"))
        if rows[name]
    ]
    facts.append(("rows", ", ".join(words)))
    cached = f" ({tokens['cached']:,} cached)" if tokens["cached"] else ""
    facts.append(("tokens", f"{tokens['prompt']:,} in{cached}, {tokens['completion']:,} out"))
    if card["seconds"]:
        times = f"{duration(card['seconds'])} and {duration(card['load_seconds'])} of loading"
        rate = f"{card['completion_tokens_per_second']:,.0f} tokens/s out"
        facts.append(("time", f"{times}, {card['rows_per_second']:,.1f} rows/s, {rate}"))
    if card["cost"] is not None:
        facts.append(("cost", f"{card['cost']:,.4f}"))
    if model is not None:
        revision = f" at {model['revision']}" if model["revision"] else ""
        facts.append(("model", f"{model['name']}{revision}"))
        if model["digest"]:
            facts.append(("digest", model["digest"]))
        facts.append(("machine", f"{model['device']}, engine {model['engine_version']}"))
    return [*facts, ("written at", card["written_at"])]


def _table(facts: Sequence[tuple[str, str]]) -> str:
    rows = (f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in facts)
    return "\n".join(("| | |", "|---|---|", *rows))


def _time_table(seconds_by_cause: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the seconds of each cause, and its share of its thread's."""
    rows = ["| thread | cause | seconds | share |", "|---|---|---:|---:|"]
    for name, causes in seconds_by_cause.items():
        total = sum(causes.values()) or 1.0
        for cause, seconds in causes.items():
            words = cause.replace("_", " ")
            rows.append(f"| {name} | {words} | {seconds:,.1f} | {seconds / total:.1%} |")
    return rows


def _plot(bins: Sequence[Mapping[str, int]]) -> list[str]:
    """Return a bar for each bin, with its bounds and its count."""
    most = max(each["count"] for each in bins)
    names = [f"{each['least']:,}–{each['most']:,}" for each in bins]
    width = max(map(len, names))
    return [
        f"{name:>{width}} {_BAR * max(1, _BAR_CHARS * each['count'] // most)} {each['count']:,}"
        for name, each in zip(names, bins, strict=True)
    ]


def _model_fields(info: EngineInfo) -> dict[str, Any]:
    return {
        "name": info.model,
        "revision": info.revision,
        "digest": info.model_digest,
        "engine_version": info.engine_version,
        "device": info.device,
        "num_gpus": info.num_gpus,
        "max_num_seqs": info.max_num_seqs,
        "adapters": list(info.adapters),
    }


def _settings(options: RunOptions) -> dict[str, Any]:
    """Return the options that differ from the defaults."""
    given = {}
    for option in fields(options):
        value = getattr(options, option.name)
        make_default = option.default_factory
        default = option.default if make_default is MISSING else make_default()
        if option.name not in _NOT_SETTINGS and value != default:
            given[option.name] = _plain(value)
    return given


def _recipe_fields(recipe: Recipe) -> dict[str, Any]:
    return {name: value for name, value in asdict(recipe).items() if name != "flags"}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(inner) for name, inner in asdict(value).items() if inner is not None}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) else str(value)
