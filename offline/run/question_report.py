"""Question report: the questions of a run card in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from tidemill.batch.calibration.report import report_lines
from tidemill.batch.table.question_counts import wording_fault

from ..console.terminal import amount

_MAX_VALUES: Final = 20


def question_lines(
    summaries: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any]
) -> Iterator[str]:
    """Yield lines with each question's distribution and diagnostics, and the prompts' layout."""
    orders = amount(recipe["permutations"], "order")
    yield f"\n## Questions\nPrompts: {recipe['question_layout']}, {orders} of the options\n"
    yield "| question | answers | entropy (bits) | label mass | winner changed by order |"
    yield "|---|---|---|---|---|"
    for summary in summaries:
        cells = (
            f"`{summary['name']}`",
            _distribution(summary),
            _number(summary["mean_entropy"]),
            _number(summary["mean_label_mass"]),
            _percent(summary.get("changed_winner")),
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    for summary in summaries:
        if (report := summary.get("calibration")) is not None:
            yield from calibration_lines(report)
    faults = [*filter(None, map(wording_fault, summaries))]
    if faults:
        yield ""
        yield from (f"- {fault}" for fault in faults)


def calibration_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the report of a calibration, and a link to its plot."""
    yield from ("\n```", *report_lines(report), "```")
    if (plot := report.get("plot")) is not None:
        yield f"\n![Accuracy by confidence]({quote(plot)})"


def _distribution(summary: Mapping[str, Any]) -> str:
    """Return the most frequent answers; the levels of a score in their order."""
    counts = [*summary["values"].items()]
    if summary["type"] == "choice":
        counts.sort(key=lambda each: -each[1])
    words = [f"{value} {count:,}" for value, count in counts[:_MAX_VALUES]]
    more = len(counts) - len(words)
    words += [f"{more:,} more"] if more else []
    if summary.get("mean_score") is not None:
        words.append(f"mean score {summary['mean_score']:.2f}")
    return ", ".join(words)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
