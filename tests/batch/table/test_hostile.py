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

MAX_KIB = 512 * 2**10
"""Most memory of a case; the function of intake has 1,769 MiB."""


@pytest.fixture(scope="module")
def reports() -> Mapping[str, Mapping[str, Any]]:
    """Return how each case ended, by name; a case whose process died is missing."""
    command = [sys.executable, "-m", hostile.__name__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {report["name"]: report for report in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", hostile.CASES)
def test_hostile_input_ends_with_a_message(
    reports: Mapping[str, Mapping[str, Any]], name: str
) -> None:
    """No input ends the process, raises another exception or takes gigabytes."""
    report = reports[name]
    assert re.search(hostile.CASES[name][1], report["outcome"]), report["outcome"]
    assert report["peak_kib"] < MAX_KIB
