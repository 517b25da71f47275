"""Batches and files of one second are in the order of their creation."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tidemill.batch.creation_order import creation_key, creation_ns
from tidemill.batch.stored_file import File

SECOND = 1_800_000_000
FILE = File("file-1", "t", "k", 5, SECOND, "n", "batch")


def test_two_creations_of_a_process_never_share_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stops or goes back changes nothing."""
    first = creation_ns()
    assert abs(first - time.time_ns()) < 10**12
    monkeypatch.setattr(time, "time_ns", lambda: first)
    second = creation_ns()
    monkeypatch.setattr(time, "time_ns", lambda: first - 10**9)
    assert first < second < creation_ns()


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ((SECOND, None), (SECOND, 0)),
        ((SECOND, 0), (SECOND, 1)),
        ((SECOND, 999_999_999), (SECOND, 10**9)),
        ((SECOND, 10**9), (SECOND, 10**15)),
        ((SECOND, 10**15), (SECOND + 1, None)),
        ((SECOND, -5), (SECOND, 1)),
    ],
)
def test_the_second_decides_first(older: tuple[int, int | None], newer: tuple[int, int]) -> None:
    """Clients see `created_at`; the nanoseconds order items of the same second."""
    keys = [
        creation_key(
            replace(
                FILE,
                id=file_id,
                created_at=created_at,
                created_ns=None if since is None else SECOND * 10**9 + since,
            )
        )
        for file_id, (created_at, since) in (("file-9", older), ("file-0", newer))
    ]
    assert keys == sorted(keys)
