"""Calibration report: the lines that the terminal and the run card show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

FEW_GOLD_ROWS: Final = 50
"""With fewer gold rows, the report calls a calibration uncertain."""

MIN_GOLD_ROWS: Final = 10
"""With fewer gold rows, nothing is fitted or measured."""

_PLOT_CHARS: Final = 40


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report of one question, as `QuestionFit.report` returns it."""
    yield from _fit_lines(report)
    if unknown := report.get("unknown_gold"):
        yield f"  gold answers whose ID no row has: {unknown:,}"


def _fit_lines(report: Mapping[str, Any]) -> Iterator[str]:
    if "problem" in report:
        yield f"{report['name']}: not calibrated, because {report['problem']}"
        return
    before, after, num_gold = report.get("before"), report.get("after"), report["gold_rows"]
    fitted = f"{report['method']} calibration fitted on {report['fitted_rows']:,} rows"
    if after is None or before is None:
        reason = f"; {num_gold:,} gold rows, accuracy is measured from {MIN_GOLD_ROWS}"
        yield f"{report['name']}: {fitted}" + (reason if num_gold else "")
        return
    yield (
        f"{report['name']}: {fitted}, measured on {report['measured_rows']:,} of {num_gold:,} "
        f"gold rows; shares are of all {report['rows']:,} rows"
    )
    if num_gold < FEW_GOLD_ROWS:
        yield f"  fewer than {FEW_GOLD_ROWS} gold rows: these figures are uncertain"
    yield (
        f"  accuracy {before['accuracy']:.1%} before, {after['accuracy']:.1%} after; expected "
        f"calibration error {before['calibration_error']:.3f} before, "
        f"{after['calibration_error']:.3f} after"
    )
    yield "  confidence at least   rows accepted   gold rows   accuracy (95 % interval from)"
    for each in _distinct(after["by_threshold"]):
        yield (
            f"  {each['threshold']:>19.2f} {each['share']:>15.0%} {each['num_rows']:>11,}   "
            f"{_accuracy(each)}"
        )
    for share in dict.fromkeys(map(acceptance, after["by_target"])):
        yield f"  {share}"
    yield from plot_lines(after["bins"])


def brief_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of a few hundred bytes, without thresholds and bins."""
    brief = {name: value for name, value in report.items() if name not in {"before", "after"}}
    for time in ("before", "after"):
        if time in report:
            brief[time] = {
                name: round(report[time][name], 4) for name in ("accuracy", "calibration_error")
            }
    return brief


def acceptance(each: Mapping[str, Any]) -> str:
    """Return the sentence that states how many rows reach a target accuracy."""
    return (
        f"accept {each['share']:.0%} of all rows at {each['accuracy']:.0%} accuracy: confidence ≥ "
        f"{each['threshold']:.3f} ({each['num_rows']:,} gold rows)"
    )


def _accuracy(each: Mapping[str, Any]) -> str:
    return f"{each['accuracy']:.1%} ({each['at_least']:.1%})" if each["num_rows"] else "-"


def _distinct(accepted: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the thresholds that accept fewer rows than the ones below them."""
    before = None
    for each in accepted:
        if each["num_rows"] != before and each["num_rows"]:
            yield each
        before = each["num_rows"]


def plot_lines(bins: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a reliability plot: `#` up to the accuracy of a bin, `|` at its mean confidence."""
    yield "  confidence   accuracy"
    for each in bins:
        bar = ["#"] * round(_PLOT_CHARS * each["accuracy"])
        bar += [" "] * (_PLOT_CHARS + 1 - len(bar))
        bar[round(_PLOT_CHARS * each["confidence"])] = "|"
        yield (
            f"  {each['confidence']:>10.2f}   {''.join(bar)} {each['accuracy']:.2f}, "
            f"{each['num_rows']:,} rows"
        )
