"""API objects, with the fields that the commands read; unknown fields are preserved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Batch:
    """A Batch object; `fields` holds its whole JSON."""

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
        """Return whether the status is terminal."""
        return self.status in ENDED

    @property
    def total(self) -> int:
        """Return the number of requests that get a row; 0 until the file has been read."""
        return int(self._counts.get("total") or 0)

    @property
    def completed(self) -> int:
        """Return the number of successful rows."""
        return int(self._counts.get("completed") or 0)

    @property
    def failed(self) -> int:
        """Return the number of error rows."""
        return int(self._counts.get("failed") or 0)

    @property
    def errors(self) -> Sequence[Mapping[str, Any]]:
        """Return the errors of the batch as a whole or of its file."""
        return (self.fields.get("errors") or {}).get("data") or ()

    @property
    def output_file_id(self) -> str | None:
        """Return the id of the output file, if any."""
        return self.fields.get("output_file_id")

    @property
    def error_file_id(self) -> str | None:
        """Return the id of the error file, if any."""
        return self.fields.get("error_file_id")

    @property
    def is_table(self) -> bool:
        """Return whether the input is a table."""
        return bool(self.extension.get("is_table"))

    @property
    def table_file_id(self) -> str | None:
        """Return the ID of the table of results, if the input was a table."""
        return self.extension.get("table_file_id")

    @property
    def table_url(self) -> str | None:
        """Return the S3 URL of the table of results."""
        return self.extension.get("table_url")

    @property
    def labels_spans(self) -> bool:
        """Return whether the model is known to label spans of texts."""
        return bool(self.extension.get("labels_spans"))

    @property
    def extension(self) -> Mapping[str, Any]:
        """Return the `tidemill` extension of the Batch: rates, cost, ETA."""
        return self.fields.get("tidemill") or {}

    @property
    def eta_at(self) -> float | None:
        """Return the estimated completion time in Unix seconds; None while it is unknown."""
        return self.extension.get("eta_at")

    def with_eta(self, eta_at: float | None) -> Batch:
        """Return a copy of the batch with another estimated completion time."""
        return Batch({**self.fields, "tidemill": {**self.extension, "eta_at": eta_at}})

    @property
    def _counts(self) -> Mapping[str, Any]:
        return self.fields.get("request_counts") or {}


@dataclass(frozen=True, slots=True)
class File:
    """A file object."""

    id: str
    num_bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload: the size of its parts, and the numbers of the parts uploaded so far."""

    id: str
    status: str
    part_bytes: int
    uploaded: frozenset[int]
    file_id: str | None


@dataclass(frozen=True, slots=True)
class RowPage:
    """Finished rows after a line, in line order; each contains its line number as `line`.

    Every line up to `complete_through` has its row on this page or an earlier one.
    """

    rows: Sequence[Mapping[str, Any]]
    complete_through: int
    has_more: bool
