"""Report of the results, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.gpu.results import WHOLE

# The displayed fields of a task, with their formats.
SHOWN: Mapping[str, Callable[[Any], str]] = {
    "said": str,
    "summary": str,
    "rows_per_second": lambda value: f"{value:,.1f} rows/s",
    "tokens_per_second": lambda value: f"{value:,.0f} tok/s",
    "audio_per_second": lambda value: f"{value:,.0f} s of audio per second",
    "bytes_per_second": lambda value: f"{value / 1e12:.3f} TB/s",
    "flops_per_second": lambda value: f"{value / 1e12:.1f} TFLOP/s",
    "share_of_copy": lambda value: f"{value:.0%} of a copy",
    "share_of_product": lambda value: f"{value:.0%} of a product",
    "host_seconds": lambda value: f"{value * 1e6:.1f} µs of the host",
    "seconds": lambda value: f"{value * 1e6:.1f} µs",
    "times_torch": lambda value: f"{value:.2f} × torch's time",
    "units_off": lambda value: f"off by {value:.1f} units",
    "share_off": lambda value: f"off by {value:.2%}",
    "other_tokens": lambda value: f"{value} other tokens",
    "rows_alike": lambda value: f"{value} rows alike",
    "largest_gap": lambda value: f"largest gap {value:.3f}",
    "outputs_per_second": lambda value: f"{value:,.0f} out tok/s",
    "of_roofline": lambda value: f"{value:.0%} of the card's roofline",
    "of_anchor": lambda value: f"{value:.2f} of the published figure",
    "step_seconds": lambda value: f"{value * 1e3:.1f} ms a step",
    "captures": lambda value: f"{value} graphs",
    "reserved_bytes": lambda value: f"{value / 2**30:.1f} GiB reserved",
    "preemptions": lambda value: f"{value} preempted",
    "errors": lambda value: f"{value} errors",
    "skipped": str,
    "error": lambda value: f"**failed**: {str(value).splitlines()[0][:120]}",
}


LONGEST_CAUSES = 4


def figures(numbers: Mapping[str, Any]) -> str:
    """Return a task's figures in one line."""
    cells = [show(numbers[key]) for key, show in SHOWN.items() if numbers.get(key) is not None]
    for part, causes in numbers.get("seconds_by_cause", {}).items():
        longest = sorted(causes.items(), key=lambda item: -item[1])[:LONGEST_CAUSES]
        cells.append(f"{part}: " + ", ".join(f"{name} {value:.1f} s" for name, value in longest))
    if profile := numbers.get("profile"):
        cells.append(f"device busy {profile['device_busy']:.0%}")
    if "holds" in numbers and not numbers["holds"]:
        cells.append("**missed**")
    return ", ".join(cells)


def report(parts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yield a table for each part, its tasks in the order of the file."""
    for name, tasks in parts.items():
        whole = tasks.get(WHOLE, {})
        took = f", {whole['seconds']:.0f} s" if "seconds" in whole else ""
        yield f"\n## {name} ({whole.get('status', 'cut off')}{took})"
        yield "| | | bound |\n|---|---|---|"
        for task, numbers in tasks.items():
            if task != WHOLE:
                yield f"| {task} | {figures(numbers)} | {verdict(numbers)} |"


def verdict(numbers: Mapping[str, Any]) -> str:
    """Return whether a bound is met, and the bound."""
    if "holds" not in numbers:
        return "–"
    bound = numbers.get("bound")
    held = "holds" if numbers["holds"] else "**missed**"
    return held if bound is None else f"{bound:g} {held}"
