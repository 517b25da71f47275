"""Names of batches for display: those of their input files."""

from __future__ import annotations

from typing import Final

from tidemill.batch.object_keys import INPUT_PREFIX

_TABLES: Final = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".ipc", ".json", ".xlsx")
_REQUESTS: Final = ".jsonl"


def is_dropped(input_file_id: str) -> bool:
    """Say whether an input was dropped into the bucket."""
    return input_file_id.startswith("s3://")


def batch_name(input_file_id: str, filename: str | None) -> str:
    """Return the name of a batch: its file's, a drop's key, or the ID of a file that is gone.

    Requests that were rendered from a table have the table's name.
    """
    if not input_file_id:
        return "erased"
    name = filename or input_file_id
    if is_dropped(input_file_id):
        name = input_file_id.split("/", 3)[-1].removeprefix(INPUT_PREFIX)
    stem = name.removesuffix(_REQUESTS)
    return stem if stem.lower().endswith(_TABLES) else name
