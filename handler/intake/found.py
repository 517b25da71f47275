"""What the units of intake leave in the bucket for each other, as JSON and as arrays of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO

from pydantic import TypeAdapter

from engine.batchfile.duplicates import Duplicates
from handler.aws.calls import Operation, T
from handler.aws.sync import Aws
from handler.batch.intake import Phase, Reading, Unit
from handler.batch.keys import ids_key, intake_key
from handler.batch.wire import MAX_LISTED_ERRORS
from handler.deployment import Deployment
from handler.intake.scan import Scanned
from handler.intake.survey import Places, Survey

_JSON = "application/json"
_BYTES = "application/octet-stream"
# Of objects that are read beside each other.
_AT_ONCE = 64

_SCANNED = TypeAdapter(Scanned)
_SURVEY = TypeAdapter(Survey)
_DUPLICATES = TypeAdapter(Duplicates)


class Found:
    """Makes the operations on what was found of one batch's file."""

    def __init__(self, deployment: Deployment, batch_id: str) -> None:
        self._bucket = deployment.bucket
        self._batch_id = batch_id

    def put_ids(self, unit: Unit, ids: IO[bytes]) -> Operation[None]:
        """Keep the ids that a scan has seen."""
        return self._bucket.put(ids_key(self._batch_id, str(unit)), ids, _BYTES)

    def get_ids(self, unit: Unit, start: int, end: int) -> Operation[bytes]:
        """Return some bytes of the ids of a scan."""
        return self._bucket.get_range(ids_key(self._batch_id, str(unit)), start, end)

    def put_scanned(self, unit: Unit, scanned: Scanned) -> Operation[None]:
        """Keep what a scan has shown."""
        return self._put(str(unit), _SCANNED.dump_json(scanned))

    def get_scanned(self, unit: Unit) -> Operation[Scanned]:
        """Return what a scan has shown."""
        return self._get(_SCANNED, str(unit))

    def put_survey(self, survey: Survey, places: Places) -> Operation[None]:
        """Keep what is known of the whole file, and where its ids are."""
        yield from self._bucket.put(self._key("places"), places.dump(), _BYTES)
        yield from self._put("survey", _SURVEY.dump_json(survey))

    def get_survey(self) -> Operation[Survey]:
        """Return what is known of the whole file."""
        return self._get(_SURVEY, "survey")

    def get_places(self, start: int, end: int) -> Operation[bytes]:
        """Return some bytes of `Places.dump`."""
        return self._bucket.get_range(self._key("places"), start, end)

    def put_duplicates(self, unit: Unit, found: Duplicates) -> Operation[None]:
        """Keep the repeated ids of a share."""
        return self._put(str(unit), _DUPLICATES.dump_json(found))

    def get_duplicates(self, unit: Unit) -> Operation[Duplicates]:
        """Return the repeated ids of a share."""
        return self._get(_DUPLICATES, str(unit))

    def _key(self, name: str) -> str:
        return intake_key(self._batch_id, name)

    def _put(self, name: str, data: bytes) -> Operation[None]:
        return self._bucket.put(self._key(name), data, _JSON)

    def _get(self, kind: TypeAdapter[T], name: str) -> Operation[T]:
        return kind.validate_json((yield from self._bucket.get(self._key(name))))


def _some_at_once(count: int) -> Iterator[range]:
    """Yield the numbers below `count` in order, as many together as are read at once."""
    for first in range(0, count, _AT_ONCE):
        yield range(first, min(first + _AT_ONCE, count))


def each(
    aws: Aws, read: Callable[[int], Operation[T]], count: int, look: Callable[[], None]
) -> Iterator[T]:
    """Yield what is read for each number below `count`, in order; `look` is called in between."""
    for some in _some_at_once(count):
        look()
        yield from aws.run_all(map(read, some))


def all_scanned(
    aws: Aws, found: Found, reading: Reading, look: Callable[[], None]
) -> Iterator[tuple[Unit, Scanned]]:
    """Yield the scans of a file with what they have shown, in its order.

    Those that took another model for the file's, where that is known, are as they were found again.
    """

    def read(number: int) -> Operation[Scanned]:
        return found.get_scanned(Unit(Phase.SCAN, number))

    for number, first in enumerate(each(aws, read, reading.num_ranges, look)):
        unit, scanned = Unit(Phase.SCAN, number), first
        yield unit, _right(aws, found, unit, scanned, reading.model)
        while scanned.end is not None:
            look()
            unit = unit.rest
            scanned = aws.run(found.get_scanned(unit))
            yield unit, _right(aws, found, unit, scanned, reading.model)


def _right(aws: Aws, found: Found, unit: Unit, scanned: Scanned, model: str | None) -> Scanned:
    if model is None or scanned.findings.model in {None, model}:
        return scanned
    again = aws.run(found.get_scanned(replace(unit, phase=Phase.AGAIN)))
    return replace(scanned, findings=again.findings)


def all_duplicates(aws: Aws, found: Found, num_shares: int, look: Callable[[], None]) -> Duplicates:
    """Return the repeated ids of all shares."""

    def read(number: int) -> Operation[Duplicates]:
        return found.get_duplicates(Unit(Phase.SEARCH, number))

    whole = Duplicates()
    for share in each(aws, read, num_shares, look):
        whole = whole.beside(share, MAX_LISTED_ERRORS)
    return whole
