"""Intake throughput on one core of this machine: scanning ranges, searching duplicate ids.

    python -m bench.cloud.intake
    python -m bench.cloud.intake --lines 1000000000 --runs 50 --scanned 60000 --searched 500000

The first makes a range of lines in memory and prints lines and ids per second, and the peak memory.
The second adds up the time for a file of any length, unit by unit, with the rates of one run and
the allowed duration of requests in a Lambda (assumed: see `Rates`).
"""

from __future__ import annotations

import argparse
import heapq
import io
import resource
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import IO, Any

from pydantic_core import to_json

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.file.duplicate_ids import (
    RECORD_BYTES,
    DuplicateFinder,
    count_shares,
    find_repeated,
)
from tidemill.batch.file.formats import FileFormat
from tidemill.batch.intake_progress import MAX_LINES, RANGE_BYTES, new_progress
from tidemill.batch.model import Source
from tidemill.batch.shard_cutter import ShardLimits
from tidemill.handler.aws.objects.stream import CHUNK_BYTES
from tidemill.handler.intake.phases import SHARDS_PER_RECORD
from tidemill.handler.intake.scan import Scanner, ScanResult

# The deployment's limit: infra/api/stack.py.
MAX_INTAKE_RUNS = 50
_MODEL = "m"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Lines:
    """An object of lines of one length, generated while it is read, without storing it."""

    line_bytes: int

    def line(self, number: int) -> bytes:
        """Return the `number`th line."""
        words = {"model": _MODEL, "messages": [{"role": "user", "content": ""}]}
        fields = {
            "custom_id": f"request-{number:012}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": words,
        }
        missing = self.line_bytes - len(to_json(fields)) - 1
        words["messages"] = [{"role": "user", "content": "x" * max(0, missing)}]
        return to_json(fields) + b"\n"

    def open(self, **_: Any) -> IO[bytes]:
        """Return a stream of lines without an end."""
        return _Endless(self)


class _Endless(io.BytesIO):
    """A stream that generates a block of lines for each read."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        # Only the id changes from line to line; the rest is generated once.
        head, self._tail = lines.line(0).split(b"request-000000000000")
        self._head = head + b"request-"
        self._number = 0
        self._left = b""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `count` bytes."""
        assert size is not None
        pieces, num_bytes = [self._left], len(self._left)
        while num_bytes < size:
            pieces.append(b"%s%012d%s" % (self._head, self._number, self._tail))
            num_bytes += len(pieces[-1])
            self._number += 1
        data = b"".join(pieces)
        self._left = data[size:]
        return data[:size]


@dataclass(frozen=True, slots=True)
class Measured:
    """Throughput of one core: lines scanned and ids searched per second, and peak memory."""

    scanned: float
    searched: float
    peak_mib: float


def scan_range(line_bytes: int, num_bytes: int, finder: DuplicateFinder) -> ScanResult:
    """Scan a range of a file that has more ranges, generated concurrently."""
    scanner = Scanner(
        Lines(line_bytes),
        Source("b", "k", "e", num_bytes),
        ShardLimits(),
        MAX_LINES,
        {_MODEL: _MODEL},
        None,
        AllowedMedia("b", "t"),
        lambda: None,
        CHUNK_BYTES,
    )
    return scanner.scan((0, num_bytes), finder)


def make_lines(line_bytes: int, num_bytes: int) -> float:
    """Return the seconds to generate these bytes, which do not count as scanning."""
    stream, begun = Lines(line_bytes).open(), time.perf_counter()
    for _ in range(num_bytes // CHUNK_BYTES):
        stream.read(CHUNK_BYTES)
    return time.perf_counter() - begun


def measure(line_bytes: int, num_bytes: int) -> Measured:
    """Scan one range, then search its ids."""
    with DuplicateFinder() as finder:
        begun = time.perf_counter()
        scanned = scan_range(line_bytes, num_bytes, finder)
        seconds = time.perf_counter() - begun - make_lines(line_bytes, num_bytes)
        saved = io.BytesIO()
        scanned.ids = finder.save(saved)
    num_lines, data, found = scanned.findings.num_rows, saved.getbuffer(), 0
    begun, start = time.perf_counter(), 0
    for count in scanned.ids:
        end = start + RECORD_BYTES * count
        found += sum(1 for _ in find_repeated([(bytes(data[start:end]), 0)]))
        start = end
    searched = sum(scanned.ids) / (time.perf_counter() - begun)
    assert found == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Measured(num_lines / seconds, searched, peak)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one run, and the cost of a request: the first two are measured.

    A request is time on the run's core (`core_seconds`) and waiting time (`wait_seconds`), with
    sixteen requests at once. The table takes `writes` of one batch in a second.
    """

    scanned: float
    searched: float
    start_seconds: float = 1.0
    core_seconds: float = 0.003
    wait_seconds: float = 0.03
    recorded: float = 500.0
    writes: float = 1000.0
    rung: float = 800.0

    def reads(self, count: int) -> float:
        """Return the seconds for some small objects, read concurrently."""
        return count * max(self.core_seconds, self.wait_seconds / 16)


@dataclass(frozen=True, slots=True)
class Intake:
    """The seconds of each phase of one file, the total of all its runs, and their price."""

    num_ranges: int
    num_shares: int
    num_shards: int
    scan: float
    survey: float
    search: float
    conclude: float
    ring: float
    run_seconds: float

    @property
    def price(self) -> float:
        """Return dollars: Lambdas of 2 GB, objects that are read and written, the table's writes.

        Marking a unit as done rewrites the names of all remaining units, of about eleven bytes.
        """
        reads = self.num_ranges * (self.num_shares + 3) + self.num_shares
        puts = 2 * self.num_ranges + self.num_shares
        writes = self.num_shards + self.num_ranges * self.num_ranges * 11 / 2 / 1024
        requests = 0.4 * reads + 5 * puts + 0.625 * writes
        return self.run_seconds * 2 * 0.0000166667 + requests / 1e6

    @property
    def total(self) -> float:
        """Return the total seconds."""
        return self.scan + self.survey + self.search + self.conclude + self.ring


def simulate(num_lines: int, line_bytes: int, num_runs: int, rates: Rates) -> Intake:
    """Return the duration for a file whose units are processed by parallel sequential runs."""
    reading = new_progress(FileFormat(), ShardLimits(), num_lines * line_bytes, RANGE_BYTES, None)
    num_ranges, num_shares = reading.num_ranges, count_shares(num_lines)
    range_lines = reading.range_bytes / line_bytes
    shard_lines = min(reading.limits.max_lines, reading.limits.max_bytes // line_bytes)
    num_shards = num_ranges * ceil(range_lines / shard_lines)
    one_scan = rates.start_seconds + range_lines / rates.scanned
    one_search = rates.start_seconds + rates.reads(num_ranges)
    one_search += num_lines / num_shares / rates.searched
    num_records = ceil(num_shards / SHARDS_PER_RECORD)
    recorded = min(rates.recorded, rates.writes / num_records)
    one_record = num_shards / num_records / recorded
    rung = (num_ranges + num_shares) / 10 * rates.wait_seconds
    # Messages are sent in the order of their names: shards are recorded first.
    last = [one_record] * num_records + [one_search] * num_shares
    return Intake(
        num_ranges,
        num_shares,
        num_shards,
        _span([one_scan] * num_ranges, num_runs) + rung,
        rates.reads(num_ranges),
        _span(last, num_runs),
        rates.reads(num_shares),
        num_shards / rates.rung,
        num_ranges * one_scan + sum(last) + num_shards / rates.rung,
    )


def _span(units: Iterable[float], num_runs: int) -> float:
    """Return the end of the last unit, if runs take units in turn."""
    free_at = [0.0] * num_runs
    for seconds in units:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    return max(free_at)


def table(rates: Rates, num_runs: int, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Return a table of files: lines and bytes of one line."""
    columns = ("ranges", "scanned", "added up", "shares of ids", "shards", "searched and recorded")
    head = ("lines, bytes of one", *columns, "rung for", "minutes", "price")
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for num_lines, line_bytes in sizes:
        one = simulate(num_lines, line_bytes, num_runs, rates)
        lines.append(
            f"| {num_lines:,}, {line_bytes:,} B | {one.num_ranges:,} | {one.scan:,.0f} s | "
            f"{one.survey:,.0f} s | {one.num_shares:,} | {one.num_shards:,} | "
            f"{one.search + one.conclude:,.0f} s | {one.ring:,.0f} s | {one.total / 60:,.1f} | "
            f"${one.price:,.2f} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one core, then add up the cost of files of some sizes, at its rate or a given one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--lines", type=int, help="estimate a file of N lines instead of the default sizes"
    )
    parser.add_argument("--line-bytes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=MAX_INTAKE_RUNS)
    parser.add_argument("--range-mib", type=int, default=RANGE_BYTES // _MIB)
    parser.add_argument(
        "--scanned", type=float, help="use this rate of lines per second instead of measuring"
    )
    parser.add_argument(
        "--searched", type=float, help="use this rate of ids per second instead of measuring"
    )
    parsed = parser.parse_args(arguments)
    scanned, searched = parsed.scanned, parsed.searched
    if not (scanned and searched):
        found = measure(parsed.line_bytes, parsed.range_mib * _MIB)
        print(
            f"one core: {found.scanned:,.0f} lines/s scanned, {found.searched:,.0f} ids/s "
            f"searched, {found.peak_mib:,.0f} MiB at most"
        )
        scanned, searched = scanned or found.scanned, searched or found.searched
    sizes = [(10**power, parsed.line_bytes) for power in (6, 7, 8, 9)]
    if parsed.lines:
        sizes = [(parsed.lines, parsed.line_bytes)]
    print("\n".join(table(Rates(scanned, searched), parsed.runs, sizes)))


if __name__ == "__main__":
    main()
