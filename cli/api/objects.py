"""What the API answers with, as far as the commands read it; fields that come later are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Batch:
    """A Batch object; `fields` is all of it."""

    fields: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Return its id."""
        return str(self.fields["id"])

    @property
    def status(self) -> str:
        """Return one of OpenAI's statuses."""
        return str(self.fields["status"])

    @property
    def has_ended(self) -> bool:
        """Say whether nothing more will happen to it."""
        return self.status in ENDED

    @property
    def total(self) -> int:
        """Return how many lines get a row; 0 until the file has been read."""
        return int(self._counts.get("total") or 0)

    @property
    def completed(self) -> int:
        """Return how many rows are good."""
        return int(self._counts.get("completed") or 0)

    @property
    def failed(self) -> int:
        """Return how many rows are not."""
        return int(self._counts.get("failed") or 0)

    @property
    def errors(self) -> Sequence[Mapping[str, Any]]:
        """Return what was wrong with the batch as a whole, or with its file."""
        return (self.fields.get("errors") or {}).get("data") or ()

    @property
    def output_file_id(self) -> str | None:
        """Return the file of good rows, if there are any."""
        return self.fields.get("output_file_id")

    @property
    def error_file_id(self) -> str | None:
        """Return the file of the other rows, if there are any."""
        return self.fields.get("error_file_id")

    @property
    def beyond(self) -> Mapping[str, Any]:
        """Return what OpenAI's Batch has no field for: rates, cost, when it will be through."""
        return self.fields.get("tidemill") or {}

    @property
    def _counts(self) -> Mapping[str, Any]:
        return self.fields.get("request_counts") or {}


@dataclass(frozen=True, slots=True)
class File:
    """A file that the server has."""

    id: str
    num_bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that has begun: the bytes of each part but the last, and which parts are there."""

    id: str
    status: str
    part_bytes: int
    uploaded: frozenset[int]
    file_id: str | None


@dataclass(frozen=True, slots=True)
class RowPage:
    """Finished rows after a line, in the order of lines; each has its number as `line`.

    Up to `complete_through` every line has its row here or before.
    """

    rows: Sequence[Mapping[str, Any]]
    complete_through: int
    has_more: bool
