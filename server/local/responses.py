"""Stored responses: requests for `/v1/responses` that are stored with the server's batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from .database import Database

SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, created INTEGER NOT NULL,"
    " request TEXT NOT NULL, response TEXT NOT NULL, is_open INTEGER NOT NULL)"
)
STORED_SECONDS: Final = 30 * 24 * 3600
"""Age at which a stored response is deleted, as OpenAI does."""

_OPEN: Final = ("queued", "in_progress")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A request with its whole input, and its response so far."""

    request: dict[str, Any]
    response: dict[str, Any]

    @property
    def is_open(self) -> bool:
        """Return whether it has not ended."""
        return self.response["status"] in _OPEN


class ResponseTable:
    """The stored responses of a server."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, stored: StoredResponse) -> None:
        """Store a new response."""
        response = stored.response
        bodies = map(json.dumps, (stored.request, response))
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
                (response["id"], response["created_at"], *bodies, stored.is_open),
            )

    def end(self, response: dict[str, Any]) -> None:
        """Store the end of a response, unless it has ended or was deleted before."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE responses SET response = ?, is_open = 0 WHERE id = ? AND is_open",
                (json.dumps(response), response["id"]),
            )

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, or None."""
        query = "SELECT request, response FROM responses WHERE id = ?"
        rows = self._database.read(query, response_id)
        return StoredResponse(*map(json.loads, rows[0])) if rows else None

    def delete(self, response_id: str) -> None:
        """Delete a response, if it is there."""
        with self._database.writing() as connection:
            query = "DELETE FROM responses WHERE id = ?"
            connection.execute(query, (response_id,))

    def open_ids(self) -> list[str]:
        """Return the IDs of responses that have not ended, oldest first."""
        rows = self._database.read("SELECT id FROM responses WHERE is_open ORDER BY created, id")
        return [response_id for (response_id,) in rows]

    def delete_expired(self, now: float) -> None:
        """Delete responses that are too old."""
        with self._database.writing() as connection:
            query = "DELETE FROM responses WHERE created < ?"
            connection.execute(query, (now - STORED_SECONDS,))
