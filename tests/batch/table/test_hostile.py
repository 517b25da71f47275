"""Hostile tables, recipes and templates: each ends with a message, within a memory limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.batch.table import hostile
from tests.long_parameters import with_long

# Each takes a fifth of a second or more, and another case meets the same limit with less.
SLOW = (
    "recipe: 900 templates",
    "table: 100,000 columns",
    "table: a gzip of 90 MB",
    "table: long values of a fixed length in Parquet",
    "table: many long pages",
    "table: millions of rows in Parquet",
    "table: records of 3 MB",
    "template: JSON of 1,500 lists",
    "template: endless: list doubled by *",
    "template: endless: list doubled by a list",
    "template: endless: sum of lists",
)
MAX_KIB = 512 * 2**10
"""Most memory of a case; the function of intake has 1,769 MiB."""


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Mapping[str, Mapping[str, Any]]:
    """Return how each selected case ended, by name; a case whose process died is missing."""
    tests = [item for item in request.session.items if item.path == request.path]
    functions = [item for item in tests if isinstance(item, pytest.Function)]
    names = [str(function.callspec.params["name"]) for function in functions]
    command = [sys.executable, "-m", hostile.__name__, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {report["name"]: report for report in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    "name", with_long([name for name in hostile.CASES if name not in SLOW], SLOW)
)
def test_hostile_input_ends_with_a_message(
    reports: Mapping[str, Mapping[str, Any]], name: str
) -> None:
    """No input ends the process, raises another exception or takes gigabytes."""
    report = reports[name]
    assert re.search(hostile.CASES[name][1], report["outcome"]), report["outcome"]
    assert report["peak_kib"] < MAX_KIB
