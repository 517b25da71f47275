"""A strict reader of the embedded metric format, and of our own rules for it."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from tidemill.handler.observability import NAMESPACE, Metric

# What CloudWatch knows, of which we use some.
UNITS = {"Count", "Count/Second", "Percent", "Seconds"}
MAX_DIMENSIONS, MAX_METRICS, MAX_CHARS = 30, 100, 1024
SERVICES = {"worker", "control", "reaper", "dead_letters", "api"}


class Line(NamedTuple):
    """Content of one line: dimensions, figures with their units, and other properties."""

    dimensions: dict[str, str]
    figures: dict[str, float]
    units: dict[str, str]
    labels: dict[str, Any]


def parse(text: str) -> Line:
    """Return the content of a line; fails if CloudWatch would create no metric, or another one."""
    fields = json.loads(text)
    check_event({name: fields.pop(name) for name in ("level", "message", "timestamp")})
    about = fields.pop("_aws")
    assert set(about) == {"Timestamp", "CloudWatchMetrics"}
    assert type(about["Timestamp"]) is int
    assert abs(about["Timestamp"] / 1000 - time.time()) < 3600
    [directive] = about["CloudWatchMetrics"]
    assert set(directive) == {"Namespace", "Dimensions", "Metrics"}
    assert directive["Namespace"] == NAMESPACE
    [names] = directive["Dimensions"]
    units = units_of(directive["Metrics"])
    dimensions = {name: fields.pop(name) for name in names}
    check_dimensions(dimensions)
    figures = {name: fields.pop(name) for name in units}
    for value in figures.values():
        assert type(value) in {int, float}
        assert math.isfinite(value)
        assert value >= 0
    assert not set(fields) & set(Metric), "a figure that no metric is made of"
    return Line(dimensions, figures, units, fields)


def check_event(event: dict[str, str]) -> None:
    """Fail unless this is a log event, in the format in which the logger writes them."""
    assert (event["level"], event["message"]) == ("INFO", "figures")
    at = datetime.strptime(event["timestamp"], "%Y-%m-%d %H:%M:%S,%f%z")
    assert abs(at.timestamp() - time.time()) < 3600


def units_of(metrics: list[dict[str, str]]) -> dict[str, str]:
    """Return the unit of each metric that is defined."""
    assert 0 < len(metrics) <= MAX_METRICS
    assert all(set(metric) == {"Name", "Unit"} for metric in metrics)
    units = {metric["Name"]: metric["Unit"] for metric in metrics}
    assert len(units) == len(metrics)
    assert set(units) <= set(Metric)
    assert set(units.values()) <= UNITS
    return units


def check_dimensions(dimensions: dict[str, str]) -> None:
    """Fail for what CloudWatch refuses, and for what would cost a metric for each value."""
    assert len(dimensions) <= MAX_DIMENSIONS
    assert set(dimensions) in ({"service"}, {"service", "model"})
    assert dimensions["service"] in SERVICES
    for value in dimensions.values():
        assert isinstance(value, str)
        assert value.isascii()
        assert 0 < len(value.strip()) <= len(value) <= MAX_CHARS
        assert not value.startswith(":")


def lines_in(output: str) -> list[Line]:
    """Return all lines of figures among what a process has written."""
    return [parse(text) for text in output.splitlines() if '"_aws"' in text]


def totals(lines: Iterable[Line]) -> Counter[str]:
    """Return the sum of each figure."""
    sums: Counter[str] = Counter()
    for line in lines:
        for name, value in line.figures.items():
            sums[name] += value  # type: ignore[assignment]
    return sums
