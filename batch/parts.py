"""Parts and segments: how finished rows of a shard become durable and ordered.

A part is one object: a line of JSON that lists its rows, then the rows. Parts of a shard may
overlap if an owner wrote after losing its lease; the first one in key order counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from tidemill.protocol.contract import Usage

from .errors import BadPart
from .file.expected_tokens import NO_TOKENS, ExpectedTokens
from .file.lines import LineError, RawLine, parse_line
from .file.rows import is_truncated, print_malformed, print_not_run
from .progress_counts import Progress

SEGMENT_BYTES = 16 * 2**20
# S3's minimum for copying an object as one part of a larger one.
MIN_COPIED_BYTES = 5 * 2**20
# S3's limit for one upload.
MAX_PARTS = 10_000
_Count = Annotated[int, Field(ge=0)]


class RowKind(IntEnum):
    """Kind of a row in its index; `SUCCESS` may be truncated, as older indexes do not list them."""

    WHOLE = 0
    TRUNCATED = 1
    FAILED = 2
    SUCCESS = 3


class FinishedRow(NamedTuple):
    """The row of one line, newline included, and its usage: zero if it was reused.

    Expected tokens are not stored in parts: the shard has their sum. The batch's second model may
    replace a draft; a row with an escalation error is the draft of a line that it did not answer.
    """

    line: int
    row: bytes
    is_success: bool
    usage: Usage = Usage()
    expected: ExpectedTokens = NO_TOKENS
    is_reused: bool = False
    is_draft: bool = False
    has_escalation_error: bool = False


class Slice(NamedTuple):
    """Bytes `start` to `end` (exclusive) of a part."""

    key: str
    start: int
    end: int


class RowPlace(NamedTuple):
    """Place of a line's row in a part, and its token usage."""

    line: int
    start: int
    end: int
    is_success: bool
    usage: Usage
    is_reused: bool = False
    is_truncated: bool = False
    has_escalation_error: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one kind that become one object: slices of parts, and each row's line and size.

    Both are in line order.
    """

    slices: tuple[Slice, ...]
    rows: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the object."""
        return sum(piece.end - piece.start for piece in self.slices)


@dataclass(frozen=True, slots=True)
class Seal:
    """All rows of a shard in order, with successes and failures in separate segments.

    `truncated` are the lines whose answer reached its token limit.
    """

    output: tuple[Segment, ...]
    errors: tuple[Segment, ...]
    truncated: tuple[int, ...] = ()


class _Head(BaseModel):
    """A part's first line: line, size, a 1 for success and three token counts for each row.

    `audio` has the line and seconds of transcribed rows, `reasoning` the line and tokens of rows
    with reasoning; `reused` lists the lines that did not run, `truncated` those whose answer
    reached its token limit, and `escalation_errors` those that the second model did not answer.
    """

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    rows: list[tuple[_Count, _Count, Literal[0, 1], _Count, _Count, _Count]]
    audio: list[tuple[_Count, Annotated[float, Field(ge=0)]]] = []
    reasoning: list[tuple[_Count, _Count]] = []
    reused: list[_Count] = []
    truncated: list[_Count] = []
    escalation_errors: list[_Count] = []


def encode_part(rows: Iterable[FinishedRow]) -> bytes:
    """Return a part with these rows, in line order."""
    ordered = sorted(rows, key=lambda row: row.line)
    listed = [[row.line, len(row.row), int(row.is_success), *row.usage[:3]] for row in ordered]
    audio = [[row.line, row.usage.audio_seconds] for row in ordered if row.usage.audio_seconds]
    thought = [[row.line, row.usage.reasoning_tokens] for row in ordered]
    thought = [[line, num_tokens] for line, num_tokens in thought if num_tokens]
    reused = [row.line for row in ordered if row.is_reused]
    truncated = [row.line for row in ordered if is_truncated(row.row)]
    lists = {
        "audio": audio,
        "reasoning": thought,
        "reused": reused,
        "truncated": truncated,
        "escalation_errors": [row.line for row in ordered if row.has_escalation_error],
    }
    some = {name: lines for name, lines in lists.items() if lines}
    head = to_json({"format": 1, "rows": listed, **some})
    return b"\n".join((head, b"".join(row.row for row in ordered)))


def decode_index(data: bytes) -> tuple[RowPlace, ...]:
    """Return the place of each row in a part; raises BadPart for other bytes."""
    head, newline, _ = data.partition(b"\n")
    return decode_head(head + newline, len(data))


def decode_head(head: bytes, num_bytes: int) -> tuple[RowPlace, ...]:
    """Return the same from a part's first line, newline included, and the size of the part."""
    try:
        parsed = _Head.model_validate_json(head)
    except ValidationError as exc:
        raise BadPart(f"not a valid part: {exc.errors()[0]['msg']}") from exc
    position = len(head)
    audio, thought = dict(parsed.audio), dict(parsed.reasoning)
    marked = [*map(frozenset, (parsed.reused, parsed.truncated, parsed.escalation_errors))]
    places = []
    for line, size, is_success, prompt, cached, completion in parsed.rows:
        usage = Usage(prompt, cached, completion, audio.get(line, 0.0), thought.get(line, 0))
        end = position + size
        marks = (line in lines for lines in marked)
        places.append(RowPlace(line, position, end, bool(is_success), usage, *marks))
        position = end
    if position != num_bytes:
        raise BadPart(f"the part has {num_bytes:,} bytes, but its rows end at {position:,}")
    return tuple(places)


class SealIndex(BaseModel):
    """The lines and sizes of the rows in each segment of a seal: an index of all rows.

    `truncated` is None in an index of an older version.
    """

    model_config = ConfigDict(strict=True)

    format: Literal[1] = 1
    output: list[list[tuple[_Count, _Count]]]
    errors: list[list[tuple[_Count, _Count]]]
    truncated: list[_Count] | None = None


def encode_seal(seal: Seal) -> bytes:
    """Return the stored index of a seal's rows."""
    rows = {
        kind: [segment.rows for segment in segments]
        for kind, segments in (("output", seal.output), ("errors", seal.errors))
    }
    return to_json({"format": 1, **rows, "truncated": seal.truncated})


def decode_seal(data: bytes) -> SealIndex:
    """Parse the bytes of `encode_seal`; raises BadPart for other bytes."""
    try:
        return SealIndex.model_validate_json(data)
    except ValidationError as exc:
        raise BadPart(f"not a valid index of rows: {exc.errors()[0]['msg']}") from exc


class PartIndex:
    """Index of the lines of a shard that have a durable row; grows part by part."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, RowPlace]] = {}
        self._completed = 0
        self._reused = 0
        self._truncated = 0
        self._escalation_failed = 0
        self._usage = Usage()

    def add(self, key: str, places: Iterable[RowPlace]) -> None:
        """Add the rows of one part; a line keeps the row that it already has."""
        for place in places:
            if place.line not in self._places:
                self._places[place.line] = (key, place)
                self._completed += place.is_success
                self._reused += place.is_reused
                self._truncated += place.is_truncated
                self._escalation_failed += place.has_escalation_error
                self._usage += place.usage

    def __contains__(self, line: int) -> bool:
        return line in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lines(self) -> frozenset[int]:
        """The numbers of the lines that have a durable row."""
        return frozenset(self._places)

    @property
    def usage(self) -> Usage:
        """The usage of all rows."""
        return self._usage

    def progress(self, drafts: PartIndex | None = None) -> Progress:
        """Return the sums over the rows, without time and rates; drafts add only their tokens."""
        failed = len(self._places) - self._completed
        return Progress(
            self._completed,
            failed,
            **(self._usage if drafts is None else self._usage + drafts.usage)._asdict(),
            reused=self._reused,
            truncated=self._truncated,
            escalated=0 if drafts is None else len(drafts),
            escalation_failed=self._escalation_failed,
        )

    def merge(self, other: PartIndex) -> None:
        """Add the rows of another index."""
        for key, places in other.places().items():
            self.add(key, places)

    def places(self, lines: Collection[int] | None = None) -> dict[str, list[RowPlace]]:
        """Return the places of these lines' rows, or of all rows, by part."""
        places: dict[str, list[RowPlace]] = defaultdict(list)
        for line, (key, place) in self._places.items():
            if lines is None or line in lines:
                places[key].append(place)
        return places

    def split(self, lines: Collection[int]) -> tuple[PartIndex, PartIndex]:
        """Return the index of these lines' rows, and that of the others."""
        both = PartIndex(), PartIndex()
        for line, (key, place) in self._places.items():
            both[line not in lines].add(key, [place])
        return both

    def computed(self) -> dict[str, list[RowPlace]]:
        """Return the places of successes that this shard's model computed, by part."""
        own = {
            line
            for line, (_, place) in self._places.items()
            if place.is_success and not place.is_reused and not place.has_escalation_error
        }
        return self.places(own)

    def seal(self, segment_bytes: int = SEGMENT_BYTES) -> Seal:
        """Return the segments of all rows, of about `segment_bytes` each except the last.

        A last segment that is too small for S3 to copy is joined to the previous one.
        """
        ordered = [self._places[line] for line in sorted(self._places)]
        return Seal(
            _cut([row for row in ordered if row[1].is_success], segment_bytes),
            _cut([row for row in ordered if not row[1].is_success], segment_bytes),
            tuple(place.line for _, place in ordered if place.is_truncated),
        )


def _cut(entries: Sequence[tuple[str, RowPlace]], segment_bytes: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    slices: list[Slice] = []
    rows: list[tuple[int, int]] = []
    num_bytes = 0
    for key, place in entries:
        last = slices[-1] if slices else None
        if last is not None and last.key == key and last.end == place.start:
            slices[-1] = Slice(key, last.start, place.end)
        else:
            slices.append(Slice(key, place.start, place.end))
        rows.append((place.line, place.end - place.start))
        num_bytes += place.end - place.start
        if num_bytes >= segment_bytes:
            segments.append(Segment(tuple(slices), tuple(rows)))
            slices, rows, num_bytes = [], [], 0
    if segments and num_bytes < MIN_COPIED_BYTES:
        before = segments.pop()
        slices, rows = [*before.slices, *slices], [*before.rows, *rows]
    if slices:
        segments.append(Segment(tuple(slices), tuple(rows)))
    return tuple(segments)


EXPIRED_MESSAGE = "The batch's completion window ended before this line ran."


@dataclass(frozen=True, slots=True)
class NotRun:
    """Reason in the row of a line that did not run, and whether it counts as failed."""

    code: str
    message: str
    is_failure: bool


EXPIRED = NotRun("batch_expired", EXPIRED_MESSAGE, is_failure=False)
OVER_COST = NotRun(
    "batch_expired", "The batch reached its `max_cost` before this line ran.", is_failure=False
)


def row_not_run(raw: RawLine, reason: NotRun) -> tuple[FinishedRow, bool]:
    """Return the row of a line that did not run, and whether it failed, as an invalid line does."""
    is_failure = reason.is_failure
    try:
        line = parse_line(raw)
    except LineError as exc:
        row, is_failure = print_malformed(raw.digest, exc), True
    else:
        row = print_not_run(line.digest, line.custom_id, code=reason.code, message=reason.message)
    return FinishedRow(raw.number, row, is_success=False), is_failure
