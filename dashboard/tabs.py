"""Tabs of the list: batches by their status and whether rows failed."""

from __future__ import annotations

from typing import Final

from tidemill.batch.states import TERMINAL, Status

RUNNING, WITH_ERRORS, FAILED, COMPLETED = "running", "with-errors", "failed", "completed"
TABS: Final = {
    "": "All",
    RUNNING: "Running",
    WITH_ERRORS: "Completed with errors",
    FAILED: "Failed",
    COMPLETED: "Completed",
}


def tab_of(status: Status, num_failed: int) -> str:
    """Return the tab of a batch besides the first; cancelled batches are only in that one."""
    if status is Status.COMPLETED:
        return WITH_ERRORS if num_failed else COMPLETED
    if status in (Status.FAILED, Status.EXPIRED):
        return FAILED
    return "" if status in TERMINAL else RUNNING
