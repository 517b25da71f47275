"""Messages of the control queue: uploads, batches to advance, worker events.

They are parsed leniently: emulators and older versions of S3's events omit fields, and a malformed
message must end here, not in a crash loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from urllib.parse import unquote_plus

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tidemill.batch.object_keys import batch_id_of_drop

from ..aws.queues import parse_message

_CREATED = "ObjectCreated:"
_TEST_EVENT = "s3:TestEvent"


@dataclass(frozen=True, slots=True)
class Drop:
    """One upload. `sequencer` orders the uploads of a key and identifies repeated events.

    It is None for an upload found without its event: it then refers to the key's newest object, and
    `mark` distinguishes it from others. `failing_since` is when a message about it first failed.
    """

    bucket: str
    key: str
    sequencer: str | None
    version_id: str | None = None
    mark: str = ""
    failing_since: int | None = None

    @property
    def batch_id(self) -> str:
        """Return the ID of the batch that it creates."""
        return batch_id_of_drop(self.bucket, self.key, self.sequencer or f"found {self.mark}")


@dataclass(frozen=True, slots=True)
class UploadEvent:
    """An event of S3 about an upload.

    It has no tenant's group, and SQS delivers it before all messages that have one: its receiver
    sends the message of the drop, which waits in its tenant's group.
    """

    drop: Drop


@dataclass(frozen=True, slots=True)
class Sweep:
    """Search for uploads without an event, among the keys after one."""

    after: str = ""


@dataclass(frozen=True, slots=True)
class Advance:
    """Request for a batch's next step."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class IntakeStep:
    """A batch whose file is to be read: one unit of that work, or the next phase."""

    batch_id: Annotated[str, Field(min_length=1)]
    unit: Annotated[
        str, Field(pattern=r"^((scan|again|search|record)-[0-9]{1,7}(-[0-9]{1,7})?)?$")
    ] = ""


@dataclass(frozen=True, slots=True)
class TableStep:
    """A batch whose table is to be written."""

    batch_id: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class ThresholdStep:
    """A batch whose threshold is to be learnt."""

    batch_id: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Event to ignore, with the reason; `is_expected` unless it results from an error."""

    reason: str
    is_expected: bool = False


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An event about a worker, which may have ended: the fleets' plans identify it."""

    event: Mapping[str, Any]


IntakeMessage = IntakeStep | TableStep | ThresholdStep
ControlMessage = UploadEvent | Drop | Sweep | Advance | IntakeMessage | WorkerEvent | Ignored


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Bucket(_Model):
    name: str = Field(min_length=1)


class _Object(_Model):
    key: str = Field(min_length=1)
    sequencer: str | None = None
    version_id: str | None = Field(default=None, alias="versionId")
    etag: str | None = Field(default=None, alias="eTag")


class _Stored(_Model):
    bucket: _Bucket
    object: _Object


class _Record(_Model):
    name: str = Field(alias="eventName")
    time: str | None = Field(default=None, alias="eventTime")
    s3: _Stored


_OwnKind = (
    TypeAdapter[Drop]
    | TypeAdapter[Sweep]
    | TypeAdapter[IntakeStep]
    | TypeAdapter[TableStep]
    | TypeAdapter[ThresholdStep]
)
_OWN_KINDS: Mapping[str, _OwnKind] = {
    "drop": TypeAdapter(Drop),
    "intake": TypeAdapter(IntakeStep),
    "sweep": TypeAdapter(Sweep),
    "table": TypeAdapter(TableStep),
    "threshold": TypeAdapter(ThresholdStep),
}


def drop_message(drop: Drop) -> dict[str, object]:
    """Return the message for an upload, equivalent to its event."""
    return {"kind": "drop", **asdict(drop)}


def sweep_message(after: str = "") -> dict[str, object]:
    """Return the message that requests a sweep, or the rest of one."""
    return {"kind": "sweep", "after": after}


def parse_control(body: str) -> list[ControlMessage]:
    """Return the requests in a message, in order; a malformed one becomes Ignored."""
    fields = parse_message(body)
    if fields is None:
        return [Ignored("not a JSON object")]
    if fields.get("Event") == _TEST_EVENT:
        return [Ignored("S3's test event", is_expected=True)]
    records = fields.get("Records")
    if isinstance(records, list):
        return [_parse_record(record) for record in records]
    if isinstance(fields.get("detail-type"), str) and isinstance(fields.get("detail"), dict):
        return [WorkerEvent(fields)]
    if (kind := _OWN_KINDS.get(str(fields.get("kind")))) is not None:
        return [_parse_own(kind, fields)]
    batch_id = fields.get("batch_id")
    if fields.get("kind") == "advance" and isinstance(batch_id, str) and batch_id:
        return [Advance(batch_id)]
    return [Ignored("neither an S3 event nor a Tidemill message")]


def _parse_own(kind: _OwnKind, fields: dict[str, Any]) -> ControlMessage:
    try:
        return kind.validate_python(fields)
    except ValidationError as exc:
        return Ignored(f"not a Tidemill message: {_first_mistake(exc)}")


def _first_mistake(exc: ValidationError) -> str:
    first = exc.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(step) for step in first["loc"])
    return f"{where}: {first['msg']}"


def _parse_record(fields: Any) -> ControlMessage:
    try:
        record = _Record.model_validate(fields)
    except ValidationError as exc:
        return Ignored(f"not an S3 record: {_first_mistake(exc)}")
    if _CREATED not in record.name:
        return Ignored(f"an S3 event of type {record.name[:80]!r}", is_expected=True)
    stored = record.s3.object
    try:
        key = unquote_plus(stored.key, errors="strict")
    except UnicodeDecodeError:
        return Ignored(f"a key that is not UTF-8: {stored.key[:80]!r}")
    version_id = stored.version_id if stored.version_id not in ("", "null") else None
    # Without a sequencer the time decides, and version or ETag distinguish simultaneous uploads.
    sequencer = stored.sequencer or f"{record.time or ''}#{version_id or stored.etag or ''}"
    return UploadEvent(Drop(record.s3.bucket.name, key, sequencer, version_id))
