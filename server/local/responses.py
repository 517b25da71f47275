"""Stored responses: requests for `/v1/responses` that are stored with the server's batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from .database import Database

SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS turns (id TEXT PRIMARY KEY, created INTEGER NOT NULL,"
    " request TEXT NOT NULL, response TEXT NOT NULL, is_open INTEGER NOT NULL,"
    " previous TEXT, number INTEGER NOT NULL, is_deleted INTEGER NOT NULL DEFAULT 0)"
)
INDEXES: Final = (
    "CREATE INDEX IF NOT EXISTS later_turns ON turns (previous)",
    "CREATE INDEX IF NOT EXISTS deleted_turns ON turns (number) WHERE is_deleted",
)
STORED_SECONDS: Final = 30 * 24 * 3600
"""Age at which a stored response is deleted, as OpenAI does."""

MAX_LINKED: Final = 100
"""Turns that are stored as links to each other; the next one is stored with all of them."""

_OPEN: Final = ("queued", "in_progress")
_CHAIN: Final = (
    "WITH RECURSIVE chain (id, previous, number) AS ("
    "SELECT id, previous, number FROM turns WHERE id = ? AND NOT is_deleted UNION ALL"
    " SELECT turns.id, turns.previous, turns.number FROM chain JOIN turns"
    " ON turns.id = chain.previous)"
    " SELECT id, request, response FROM chain JOIN turns USING (id) ORDER BY chain.number"
)
_DELETE_UNUSED: Final = (
    "DELETE FROM turns WHERE id = ? AND is_deleted"
    " AND NOT EXISTS (SELECT 1 FROM turns AS later WHERE later.previous = turns.id)"
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A request with its own input, and its response so far."""

    request: dict[str, Any]
    response: dict[str, Any]

    @property
    def is_open(self) -> bool:
        """Return whether it has not ended."""
        return self.response["status"] in _OPEN


class ResponseTable:
    """The stored responses of a server.

    A turn of a conversation is stored with a link to the one before, which stays as long as a
    later turn needs it, even if it was deleted or has expired.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, stored: StoredResponse, earlier: Sequence[Any] = ()) -> None:
        """Store a new response that continues a conversation with these items."""
        request, response = stored.request, stored.response
        previous, number = response.get("previous_response_id"), 1
        with self._database.writing() as connection:
            query = "SELECT number FROM turns WHERE id = ?"
            found = connection.execute(query, (previous,)).fetchone()
            if found is not None and found[0] < MAX_LINKED:
                number += found[0]
            else:  # the last turn was deleted in the meantime, or there are many
                previous = None
                if earlier:
                    request = {**request, "input": [*earlier, *input_items(request)]}
            bodies = map(json.dumps, (request, response))
            connection.execute(
                "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
                (
                    *(response["id"], response["created_at"], *bodies),
                    *(stored.is_open, previous, number),
                ),
            )

    def end(self, response: dict[str, Any]) -> None:
        """Store the end of a response, unless it has ended or was deleted before."""
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE turns SET response = ?, is_open = 0 WHERE id = ? AND is_open",
                (json.dumps(response), response["id"]),
            )

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, or None."""
        query = "SELECT request, response FROM turns WHERE id = ? AND NOT is_deleted"
        rows = self._database.read(query, response_id)
        return StoredResponse(*map(json.loads, rows[0])) if rows else None

    def conversation(self, response_id: str) -> StoredResponse | None:
        """Return a response whose input includes the items of the turns before it, or None."""
        rows = self._database.read(_CHAIN, response_id)
        if not rows:
            return None
        *earlier, last = [StoredResponse(*map(json.loads, bodies)) for _, *bodies in rows]
        if not earlier:
            return last
        turns = [(*input_items(each.request), *each.response["output"]) for each in earlier]
        items = [*chain.from_iterable(turns), *input_items(last.request)]
        return replace(last, request={**last.request, "input": items})

    def delete(self, response_id: str) -> None:
        """Delete a response, if it is there, and deleted ones that only it continued."""
        with self._database.writing() as connection:
            names = [(name,) for name, *_ in connection.execute(_CHAIN, (response_id,))]
            connection.execute("UPDATE turns SET is_deleted = 1 WHERE id = ?", (response_id,))
            connection.executemany(_DELETE_UNUSED, names[::-1])

    def open_ids(self) -> list[str]:
        """Return the IDs of responses that have not ended, oldest first."""
        rows = self._database.read("SELECT id FROM turns WHERE is_open ORDER BY created, id")
        return [response_id for (response_id,) in rows]

    def delete_expired(self, now: float) -> None:
        """Delete responses that are too old."""
        with self._database.writing() as connection:
            query = "UPDATE turns SET is_deleted = 1 WHERE created < ? AND NOT is_deleted"
            connection.execute(query, (now - STORED_SECONDS,))
            query = "SELECT id FROM turns WHERE is_deleted ORDER BY number DESC"
            names = connection.execute(query).fetchall()
            connection.executemany(_DELETE_UNUSED, names)


def input_items(request: dict[str, Any]) -> list[Any]:
    """Return the input of a request as items."""
    given = request["input"]
    return given if isinstance(given, list) else [{"role": "user", "content": given}]
