"""Report of the results, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# What of a task is shown: its field, and how.
SHOWN: Mapping[str, Callable[[Any], str]] = {
    "bytes_per_second": lambda value: f"{value / 1e12:.3f} TB/s",
    "flops_per_second": lambda value: f"{value / 1e12:.1f} TFLOP/s",
    "share_of_copy": lambda value: f"{value:.0%} of a copy",
    "share_of_product": lambda value: f"{value:.0%} of a product",
    "host_seconds": lambda value: f"{value * 1e6:.1f} µs of the host",
    "units_off": lambda value: f"off by {value:.1f} units",
    "share_off": lambda value: f"off by {value:.2%}",
    "other_tokens": lambda value: f"{value} other tokens",
    "rows_alike": lambda value: f"{value} rows alike",
    "largest_gap": lambda value: f"largest gap {value:.3f}",
    "outputs_per_second": lambda value: f"{value:,.0f} out tok/s",
    "foretold_outputs_per_second": lambda value: f"foretold {value:,.0f}",
    "of_roofline": lambda value: f"{value:.0%} of the card's roofline",
    "of_h200s_roofline": lambda value: f"{value:.0%} of an H200's",
    "step_seconds": lambda value: f"{value * 1e3:.1f} ms a step",
    "preemptions": lambda value: f"{value} gave way",
    "errors": lambda value: f"{value} errors",
    "skipped": str,
    "error": lambda value: f"**failed**: {str(value).splitlines()[0][:120]}",
}


def report(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines: card and versions, then a table for each part."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    yield f"{results['card']['name']}; {versions}; `{results['command']}`"
    for name, part in results["parts"].items():
        took = f", {part['seconds']:.0f} s" if "seconds" in part else ""
        yield f"\n## {name} ({part.get('status', 'not run')}{took})"
        yield "| | | bound |\n|---|---|---|"
        for task, numbers in part.get("tasks", {}).items():
            cells = ", ".join(show(numbers[key]) for key, show in SHOWN.items() if key in numbers)
            profile = numbers.get("profile")
            if profile:
                cells += f", device busy {profile['device_busy']:.0%}"
            yield f"| {task} | {cells} | {verdict(numbers)} |"


def verdict(numbers: Mapping[str, Any]) -> str:
    """Return whether a bound holds, and which."""
    if "holds" not in numbers:
        return "–"
    bound = numbers.get("bound")
    held = "holds" if numbers["holds"] else "**missed**"
    return held if bound is None else f"{bound:g} {held}"
