"""Reasons of process exits, in a few words."""

from __future__ import annotations

import pytest

from localstack.processes import exit_reason


@pytest.mark.parametrize(
    ("status", "log", "reason"),
    [
        (-9, "tidemill: old news\n", "killed by SIGKILL"),
        (1, "", "exited with status 1"),
        (1, "noise\ntidemill: AWS cannot be used: no\nmore noise\n", "AWS cannot be used: no"),
        (
            1,
            '{"level":"ERROR","message":"refused","reason":"no model"}\n[1]\n',
            "refused: no model",
        ),
    ],
)
def test_the_reason_is_the_last_complaint(status: int, log: str, reason: str) -> None:
    """It is the line that a person would look for in the log."""
    assert exit_reason(status, log) == reason
