"""Scan store: results of intake units in the bucket, as JSON and as arrays of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO, Any, Final

from pydantic import TypeAdapter

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.file.duplicate_ids import Duplicates
from tidemill.batch.intake_progress import IntakeProgress, Phase, WorkUnit
from tidemill.batch.object_keys import ids_key, intake_key

from ..aws.calls import Operation, T
from ..aws.sync import Aws
from ..deployment import Deployment
from .scan import ScanResult
from .scan_summary import IdOffsets, ScanSummary

_JSON = "application/json"
_BYTES = "application/octet-stream"
# Number of objects that are read concurrently.
_AT_ONCE = 64

_ADAPTERS: Final[dict[type, TypeAdapter[Any]]] = {}


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the adapter of a class; it is built when a file is read in parts, not at a start."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


class ScanStore:
    """Creates operations on the scan results of one batch's file."""

    def __init__(self, deployment: Deployment, batch_id: str) -> None:
        self._bucket = deployment.bucket
        self._batch_id = batch_id

    def put_ids(self, unit: WorkUnit, ids: IO[bytes]) -> Operation[None]:
        """Store the IDs that a scan has seen."""
        return self._bucket.put(ids_key(self._batch_id, str(unit)), ids, _BYTES)

    def get_ids(self, unit: WorkUnit, start: int, end: int) -> Operation[bytes]:
        """Return a range of bytes of a scan's IDs."""
        return self._bucket.get_range(ids_key(self._batch_id, str(unit)), start, end)

    def put_scanned(self, unit: WorkUnit, scanned: ScanResult) -> Operation[None]:
        """Store the result of a scan."""
        return self._put(str(unit), scanned)

    def get_scanned(self, unit: WorkUnit) -> Operation[ScanResult]:
        """Return the result of a scan."""
        return self._get(ScanResult, str(unit))

    def put_survey(self, survey: ScanSummary, places: IdOffsets) -> Operation[None]:
        """Store the summary of the whole file, and the offsets of its IDs."""
        yield from self._bucket.put(self._key("places"), places.dump(), _BYTES)
        yield from self._put("survey", survey)

    def get_survey(self) -> Operation[ScanSummary]:
        """Return the summary of the whole file."""
        return self._get(ScanSummary, "survey")

    def get_places(self, start: int, end: int) -> Operation[bytes]:
        """Return a range of bytes of `IdOffsets.dump`."""
        return self._bucket.get_range(self._key("places"), start, end)

    def put_duplicates(self, unit: WorkUnit, found: Duplicates) -> Operation[None]:
        """Store the repeated IDs of a share."""
        return self._put(str(unit), found)

    def get_duplicates(self, unit: WorkUnit) -> Operation[Duplicates]:
        """Return the repeated IDs of a share."""
        return self._get(Duplicates, str(unit))

    def _key(self, name: str) -> str:
        return intake_key(self._batch_id, name)

    def _put(self, name: str, value: ScanResult | ScanSummary | Duplicates) -> Operation[None]:
        data = _adapter(type(value)).dump_json(value)
        return self._bucket.put(self._key(name), data, _JSON)

    def _get(self, kind: type[T], name: str) -> Operation[T]:
        return _adapter(kind).validate_json((yield from self._bucket.get(self._key(name))))


def _chunks(count: int) -> Iterator[range]:
    """Yield the numbers below `count` in order, in groups that are read concurrently."""
    for first in range(0, count, _AT_ONCE):
        yield range(first, min(first + _AT_ONCE, count))


def read_each(
    aws: Aws, read: Callable[[int], Operation[T]], count: int, look: Callable[[], None]
) -> Iterator[T]:
    """Yield a read value for each number below `count`, in order; `look` is called in between."""
    for some in _chunks(count):
        look()
        yield from aws.run_all(map(read, some))


def read_scans(
    aws: Aws, found: ScanStore, reading: IntakeProgress, look: Callable[[], None]
) -> Iterator[tuple[WorkUnit, ScanResult]]:
    """Yield the scans of a file with their results, in file order.

    Scans that assumed another model than the file's come as their repetition found them.
    """

    def read(number: int) -> Operation[ScanResult]:
        return found.get_scanned(WorkUnit(Phase.SCAN, number))

    for number, first in enumerate(read_each(aws, read, reading.num_ranges, look)):
        unit, scanned = WorkUnit(Phase.SCAN, number), first
        yield unit, _with_final_model(aws, found, unit, scanned, reading.model)
        while scanned.end is not None:
            look()
            unit = unit.rest
            scanned = aws.run(found.get_scanned(unit))
            yield unit, _with_final_model(aws, found, unit, scanned, reading.model)


def _with_final_model(
    aws: Aws, found: ScanStore, unit: WorkUnit, scanned: ScanResult, model: str | None
) -> ScanResult:
    if model is None or scanned.findings.model in {None, model}:
        return scanned
    again = aws.run(found.get_scanned(replace(unit, phase=Phase.AGAIN)))
    return replace(scanned, findings=again.findings)


def merge_duplicates(
    aws: Aws, found: ScanStore, num_shares: int, look: Callable[[], None]
) -> Duplicates:
    """Return the repeated IDs of all shares."""

    def read(number: int) -> Operation[Duplicates]:
        return found.get_duplicates(WorkUnit(Phase.SEARCH, number))

    whole = Duplicates()
    for share in read_each(aws, read, num_shares, look):
        whole = whole.merged(share, MAX_LISTED_ERRORS)
    return whole
