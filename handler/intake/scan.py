"""Scan of one range of a file: validates its lines, cuts shards and collects IDs.

A line belongs to the range in which it begins, and is read there as a whole. All line numbers are
local. In the first range they are those of the file. In every other range, line 1 is the line in
whose middle, or after whose end, the range begins: its own lines are numbered from 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.file.duplicate_ids import DuplicateFinder
from tidemill.batch.file.expected_tokens import NO_TOKENS, ExpectedTokens
from tidemill.batch.file.lines import FormatError, check_line_length, read_lines
from tidemill.batch.model import Shard, Source
from tidemill.batch.shard_cutter import ShardCutter, ShardLimits
from tidemill.batch.validation import Findings, LineChecker

from ..aws.objects.stream import LineStream, ObjectStream, Opener

_MORE_NAMES = "Use one of these, or add the name to the model's `aliases` in the configuration."
_SKIPPED_BYTES = 2**20


class PlannedShard(NamedTuple):
    """One planned shard of a range, by local line numbers and bytes of the file."""

    first_line: int
    num_rows: int
    start: int
    end: int
    expected: ExpectedTokens = NO_TOKENS


@dataclass(slots=True)
class ScanResult:
    """Result of scanning a range; its errors contain local line numbers, too.

    `last_line` is the number of the last line that ended, or that contains the whole range.
    `ids` is the number of IDs in each partition. `end` is the byte at which the next part of the
    range begins, if it has more lines than one run checks. `endless` is a line longer than any file
    may have: the bytes after it were not read.
    """

    last_line: int = 0
    findings: Findings = field(default_factory=Findings)
    cuts: list[PlannedShard] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    end: int | None = None
    endless: int | None = None


@dataclass(frozen=True, slots=True)
class Scanner:
    """Scanner of a file's ranges: the settings that all ranges share.

    `models`, `endpoint` and `media` are those of `LineChecker`. `look` is called before each chunk.
    """

    aws: Opener
    source: Source
    limits: ShardLimits
    max_lines: int
    models: Mapping[str, str]
    endpoint: str | None
    media: AllowedMedia
    look: Callable[[], None]
    chunk_bytes: int

    def scan(
        self, span: tuple[int, int], finder: DuplicateFinder, model: str | None = None
    ) -> ScanResult:
        """Read the lines that begin in a range of bytes, and pass their IDs to the finder.

        `model` is that of the preceding lines, if known. Raises ObjectChanged, NotThere and
        AwsError.
        """
        start, end = span
        begin = max(0, start - 1)
        stream = ObjectStream(self.aws, self.source, begin)
        scanned = ScanResult(findings=Findings(model=model))

        def look() -> None:
            self.look()
            if lines.num_lines or not start:
                check_line_length(lines.num_lines + 1, lines.tell() - lines.end)

        lines = LineStream(
            stream,
            start=begin,
            stop=end,
            max_lines=self.max_lines,
            look=look,
            chunk_bytes=self.chunk_bytes,
        )
        try:
            if not start or _skip_line(lines, end):
                self._read(lines, 2 if start else 1, scanned, finder)
        except FormatError as exc:
            scanned.endless = exc.number
        finally:
            stream.close()
        if lines.num_lines >= self.max_lines and lines.end < end:
            scanned.end = lines.end
        scanned.last_line = max(lines.num_lines, 1 if start else 0)
        return scanned

    def _read(
        self, lines: LineStream, first_number: int, scanned: ScanResult, finder: DuplicateFinder
    ) -> None:
        checker = LineChecker(
            scanned.findings,
            models=self.models,
            endpoint=self.endpoint,
            add_id=finder.add,
            more_names=_MORE_NAMES,
            media=self.media,
        )
        cutter = ShardCutter("", self.limits)

        planned = NO_TOKENS  # of the lines in shards

        def keep(shard: Shard | None, expected: ExpectedTokens) -> None:
            nonlocal planned
            if shard is not None:
                cut = (shard.first_line, shard.num_rows, shard.start, shard.end)
                scanned.cuts.append(PlannedShard(*cut, expected - planned))
                planned = expected

        for raw in read_lines(lines, first_number=first_number):
            before = scanned.findings.expected
            checker.check(raw)
            keep(cutter.add(raw.number, lines.line_start, lines.tell()), before)
        keep(cutter.finish(), scanned.findings.expected)


def _skip_line(lines: LineStream, end: int) -> bool:
    """Read to the end of the line that began before the range; False if none begins in it."""
    while (size := min(_SKIPPED_BYTES, end - lines.tell())) > 0:
        data = lines.readline(size)
        if data.endswith(b"\n"):
            return lines.tell() < end
        if not data:
            return False
    return False
