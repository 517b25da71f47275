"""Row index: finds rows of a file by custom ID, with a hash table in flat arrays.

A row takes 36 to 44 bytes, regardless of its size. IDs are compared by 64-bit hashes. Rows with the
same ID are found in file order, each once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Self

from .row_file import RowFile, RowPlace, StoredRow

_FREE = 0  # otherwise the row's position + 1, negative once all rows of the ID were found
_DIGEST_BYTES = 8


class RowIndex:
    """Places of the rows of a file, by custom id."""

    def __init__(self) -> None:
        self._digests = array("Q")
        self._numbers = array("q")
        self._offsets = array("q")
        self._end = 0
        self._next = array("i")  # the next row with the same ID, as in `_table`
        self._table = array("i")

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, row: StoredRow, place: RowPlace) -> None:
        """Add the next row of the file; no row may be added after the first lookup."""
        self._digests.append(_digest_of(row))
        self._numbers.append(place.number)
        self._offsets.append(place.offset)
        self._end = place.offset + place.num_bytes

    @classmethod
    def from_rows(cls, rows: RowFile) -> Self:
        """Return the index of a whole file; raises BadInput for a line that is not a row."""
        index = cls()
        for place, row in rows.rows():
            index.add(row, place)
        return index

    def find_id(self, custom_id: str) -> RowPlace | None:
        """Return the place of the first row with a custom ID, in an index without pops."""
        if not self._table:
            self._build()
        slot = self._slot_of(_digest_of(StoredRow(None, custom_id, None, None)))
        found = self._table[slot]
        return self._place_of(found - 1) if found > 0 else None

    def pop_id(self, custom_id: str) -> RowPlace | None:
        """Return the place of the first row with a custom ID that was not yet popped."""
        return self.pop(StoredRow(None, custom_id, None, None))

    def pop(self, row: StoredRow) -> RowPlace | None:
        """Return the place of the first row with the same ID that was not yet popped."""
        if not self._table:
            self._build()
        slot = self._slot_of(_digest_of(row))
        found = self._table[slot]
        if found <= 0:
            return None
        self._table[slot] = self._next[found - 1] or -found
        self._next[found - 1] = -1
        return self._place_of(found - 1)

    def left(self) -> Iterator[RowPlace]:
        """Yield the places of the rows that were never popped, in file order."""
        if not self._table:
            self._build()
        return (self._place_of(row) for row in range(len(self)) if self._next[row] >= 0)

    def _build(self) -> None:
        """Chain the rows of each ID, last row first, so that the first becomes the head."""
        size = 1 << (2 * len(self) + 1).bit_length()
        self._table = array("i", bytes(4 * size))
        self._next = array("i", bytes(4 * len(self)))
        for row in range(len(self) - 1, -1, -1):
            slot = self._slot_of(self._digests[row])
            self._next[row] = self._table[slot]
            self._table[slot] = row + 1

    def _slot_of(self, digest: int) -> int:
        mask = len(self._table) - 1
        slot = digest & mask
        while (entry := self._table[slot]) != _FREE and self._digests[abs(entry) - 1] != digest:
            slot = (slot + 1) & mask
        return slot

    def _place_of(self, row: int) -> RowPlace:
        offset = self._offsets[row]
        end = self._offsets[row + 1] if row + 1 < len(self) else self._end
        return RowPlace(self._numbers[row], offset, end - offset)


def _digest_of(row: StoredRow) -> int:
    """Return the digest of the custom ID, or of the row's ID if it has no custom ID."""
    custom_id = row.custom_id
    name = f"\0{row.row_id}" if custom_id is None else custom_id
    data = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=_DIGEST_BYTES).digest(), "little")
