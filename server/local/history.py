"""Table of the progress of batches over time: for plots only, never authoritative."""

from __future__ import annotations

import sqlite3
from dataclasses import astuple

from tidemill.batch.model import Batch
from tidemill.batch.progress import HistoryBucket, history_bucket
from tidemill.batch.progress_counts import Progress

from .database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS history (
    batch TEXT NOT NULL,
    start INTEGER NOT NULL,
    seconds INTEGER NOT NULL,
    completed INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    audio_seconds REAL NOT NULL,
    PRIMARY KEY (batch, start, seconds)
) WITHOUT ROWID
"""
_LIST = (
    "SELECT start, seconds, completed, failed, tokens, input_tokens, audio_seconds FROM history"
    " WHERE batch = ? ORDER BY start"
)
_ADD = (
    "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
    " completed = completed + excluded.completed, failed = failed + excluded.failed,"
    " tokens = tokens + excluded.tokens, input_tokens = input_tokens + excluded.input_tokens,"
    " audio_seconds = audio_seconds + excluded.audio_seconds"
)


def add_history_by(
    connection: sqlite3.Connection, batch: Batch, gained: Progress, now: float
) -> None:
    """Add progress to the current bucket within a transaction."""
    bucket = HistoryBucket.of(*history_bucket(batch, now), gained)
    connection.execute(_ADD, (batch.id, *astuple(bucket)))


def list_history(database: Database, batch_id: str) -> list[HistoryBucket]:
    """Return the history of a batch, by time."""
    return [HistoryBucket(*row) for row in database.read(_LIST, batch_id)]
