"""A file in ranges, put together again: what one look at the whole finds, whatever the ranges."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.handler.intake.rig import line_of
from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.file.duplicate_ids import DuplicateFinder, Duplicates, Share, find_repeated
from tidemill.batch.file.formats import HEAD_BYTES, FileFormat, detect_format
from tidemill.batch.file.lines import FormatError
from tidemill.batch.intake_progress import Phase, WorkUnit, new_progress
from tidemill.batch.model import OnInvalidLine, Options, Shard, Source
from tidemill.batch.shard_cutter import ShardLimits
from tidemill.batch.validation import NOT_JSON, Findings, Verdict, judge, refuse
from tidemill.handler.intake.scan import Scanner, ScanResult
from tidemill.handler.intake.scan_summary import (
    IdOffsets,
    ScanSummary,
    decode_offsets,
    offsets_range,
    scans_of_other_models,
    shards_of,
)
from tidemill.server.local.validation import check_file

MODELS = {"m": "m", "n": "n", "tidemill-demo": "tidemill-demo"}
LIMITS = ShardLimits(3, 400)


@dataclass(frozen=True, slots=True)
class Memory:
    """An object in memory."""

    data: bytes

    def open(self, **pin: Any) -> IO[bytes]:
        """Return its bytes, from the requested position."""
        first = pin.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")
        return io.BytesIO(self.data[int(first) :])


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of the runs over a file's ranges."""

    verdict: Verdict
    findings: Findings
    shards: list[Shard]


def look_at(
    data: bytes,
    range_bytes: int,
    *,
    chunk_bytes: int,
    choice: OnInvalidLine,
    num_shares: int = 1,
    max_lines: int = 1000,
) -> Seen:
    """Scan a file range by range, those of another model again, and search its ids."""
    try:
        form = detect_format(data[:HEAD_BYTES])
    except FormatError as exc:
        return Seen(refuse(NOT_JSON, exc.message), Findings(), [])
    reading = new_progress(form, LIMITS, len(data), range_bytes, None)
    source = Source("b", "k", "e", len(data))
    media = AllowedMedia("b", "t")
    scanner = Scanner(
        Memory(data),
        source,
        reading.limits,
        max_lines,
        MODELS,
        None,
        media,
        lambda: None,
        chunk_bytes,
    )
    scans, saved, spans = [], [], []
    for number in range(reading.num_ranges):
        start, end = reading.range_of(number)
        while True:
            stream = io.BytesIO()
            with DuplicateFinder() as finder:
                scanned = scanner.scan((start, end), finder)
                scanned.ids = finder.save(stream)
            scans.append(scanned)
            saved.append(stream.getvalue())
            spans.append((start, scanned.end or end))
            if scanned.end is None:
                break
            start = scanned.end
    models = [scanned.findings.model for scanned in scans]
    for number in scans_of_other_models(models):
        with DuplicateFinder() as finder:
            right = scanner.scan(spans[number], finder, next(filter(None, models)))
        scans[number].findings = right.findings
    try:
        survey = survey_of(scans)
    except FormatError as exc:
        return Seen(refuse(NOT_JSON, exc.message), Findings(), [])
    duplicates = search(scans, survey, saved, num_shares)
    verdict = judge(
        survey.findings,
        duplicates,
        mistake=form.suspicion,
        on_invalid_line=choice,
        unit=form.unit,
    )
    return Seen(verdict, survey.findings, list(shards_in(scans, survey)))


def survey_of(scans: Sequence[ScanResult]) -> ScanSummary:
    """Return what is known of the whole file."""
    survey = ScanSummary()
    for number, scanned in enumerate(scans):
        survey.add(WorkUnit(Phase.SCAN, number), scanned)
    return survey


def search(
    scans: Sequence[ScanResult], survey: ScanSummary, saved: Sequence[bytes], num_shares: int
) -> Duplicates:
    """Look for repeated ids share by share, as runs do."""
    places = IdOffsets()
    for scanned in scans:
        places.add(scanned.ids)
    index, found = places.dump(), Duplicates()
    for number in range(num_shares):
        share = Share.nth(number, num_shares)
        rows = decode_offsets(index[slice(*offsets_range(share, len(scans)))], len(scans))
        of_share = Duplicates()
        for start, end in pairwise(rows):
            pieces = [
                (data[first:last], shift)
                for data, first, last, shift in zip(saved, start, end, survey.shifts, strict=True)
            ]
            repeated = find_repeated(pieces, share.slice_number, share.num_slices)
            of_share = of_share.plus(repeated, 100)
        found = found.merged(of_share, 100)
    return found


def shards_in(scans: Sequence[ScanResult], survey: ScanSummary) -> Iterator[Shard]:
    """Yield the shards of all ranges."""
    for number, scanned in enumerate(scans):
        first, shift = survey.first_shards[number], survey.shifts[number]
        yield from shards_of("b", scanned.cuts, first=first, shift=shift, expires=None)


def whole(data: bytes, choice: OnInvalidLine) -> tuple[Verdict, Findings]:
    """Return what one look at a file on a disk finds."""
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        options = Options(on_invalid_line=choice)
        verdict, findings, _ = check_file(Path(file.name), MODELS, options, lambda: None)
        return verdict, findings


def check_shards(data: bytes, shards: Sequence[Shard]) -> None:
    """See that each line which is not blank is in one shard, at its place, by its number."""
    lines = data.split(b"\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    wanted = [
        number
        for number, line in enumerate(lines, 1)
        if line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip(b" \t\r\n")
    ]
    found = []
    for number, shard in enumerate(shards):
        assert shard.number == number
        assert shard.start == starts[shard.first_line - 1]
        inside = [line for line in wanted if shard.start <= starts[line - 1] < shard.end]
        assert len(inside) == shard.num_rows
        assert inside[0] == shard.first_line
        assert shard.end in {starts[inside[-1]], len(data)}
        found += inside
    assert found == wanted


ends = st.sampled_from([b"", b"\n", b"\r\n", b"\n\n"])
heads = st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\n"])
ids = st.integers(0, 30)
lines = st.one_of(
    ids.map(line_of),
    ids.map(line_of),
    ids.map(lambda number: line_of(number, body={"model": "n"})),
    ids.map(lambda number: line_of(number, body={"model": "n", "stream": True})),
    ids.map(lambda number: line_of(number, url="/v1/completions") + b"\r"),
    st.sampled_from([b"", b" \r", b"\xef\xbb\xbf", b"{", b"[1]", b"{}", b"\xff"]),
    st.sampled_from([line_of("u", url="/nowhere"), line_of("m", body={"model": 1})]),
    st.integers(1, 3).map(lambda size: line_of("long" + "x" * 400 * size)),
)
files = st.builds(
    lambda head, some, end: head + b"\n".join(some) + end,
    heads,
    st.lists(lines, max_size=25),
    ends,
)


@given(
    files,
    st.integers(1, 600),
    st.integers(1, 400),
    st.sampled_from(["fail", "skip"]),
    st.sampled_from([1, 4, 256, 512]),
    st.integers(2, 12),
)
@example(b"\n", 1, 1, "fail", 1, 2)
@example(b"", 5, 1, "fail", 1, 2)
@example(line_of("a" * 900) + b"\n" + line_of(1), 100, 7, "fail", 1, 2)
@example(b"{}\n" * 120 + line_of(1), 40, 50, "fail", 1, 5)
@example(b"\n" * 50 + line_of(1), 200, 50, "fail", 1, 7)
def test_ranges_find_what_one_look_finds(  # noqa: PLR0917 - hypothesis draws them
    data: bytes,
    range_bytes: int,
    chunk_bytes: int,
    choice: OnInvalidLine,
    num_shares: int,
    max_lines: int,
) -> None:
    """The same verdict in the same words, counts, model and endpoint; each line in one shard."""
    seen = look_at(
        data,
        range_bytes,
        chunk_bytes=chunk_bytes,
        choice=choice,
        num_shares=num_shares,
        max_lines=max_lines,
    )
    verdict, findings = whole(data, choice)
    assert seen.verdict == verdict
    if seen.shards or findings.num_rows:
        assert seen.findings == findings
        check_shards(data, seen.shards)


@pytest.mark.parametrize("range_bytes", [100, 600, 10_000])
def test_a_line_without_an_end_is_given_up_by_its_number(
    monkeypatch: pytest.MonkeyPatch, range_bytes: int
) -> None:
    """Ranges in its middle are read no further than to their own ends."""
    monkeypatch.setattr("tidemill.batch.file.lines.MAX_SKIPPED_BYTES", 500)
    data = line_of(1) + b"\n\n" + b'{"custom_id": "' + b"x" * 3000
    seen = look_at(data, range_bytes, chunk_bytes=50, choice="skip")
    [error] = seen.verdict.errors
    assert error.message == "Line 3 is longer than any request may be."


def test_a_file_of_any_length_has_no_more_ranges_than_runs_can_know_of() -> None:
    """A longer file has longer ranges."""
    reading = new_progress(FileFormat(), LIMITS, 5 * 2**40, 2**28, None)
    assert reading.num_ranges == 4096
    assert reading.range_of(4095) == (4095 * reading.range_bytes, 5 * 2**40)
    assert new_progress(FileFormat(), LIMITS, 10**12, 2**28, None).num_ranges == 3726
