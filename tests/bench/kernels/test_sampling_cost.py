"""What sampling costs: every kind of row goes through both ways and is told."""

from __future__ import annotations

import sys

import pytest

from bench.kernels.sampling_cost import KINDS, main


def test_every_kind_of_row_is_measured_in_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line of a table each, and log-probabilities last."""
    arguments = ["--rows", "3", "--vocabulary", "500", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["sampling_cost", *arguments])
    main()
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [line[1].strip() for line in table[2:]] == [*KINDS, "log-probabilities of 20"]
    assert all(float(line[2]) >= 0 and line[3].strip() for line in table[2:])
