"""Estimates finalize's time to join a batch of any size: requests counted by the real plan.

    python -m bench.cloud.join --lines 1000000000

Each scenario's shards are cut as in intake, range by range; their rows become segments as in a
worker; and `handler.aws.objects.upload_plan` decides what is copied and what is sent. The time of a
request is assumed (`Assumed`): it was not measured in an account yet.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from tidemill.batch.parts import MIN_COPIED_BYTES, SEGMENT_BYTES
from tidemill.batch.shard_cutter import ShardLimits
from tidemill.handler.aws.objects.upload_plan import plan_groups, plan_upload

_MIB = 2**20
_RANGE_BYTES = 256 * _MIB  # of input; shards are cut again in each
_THREADS, _SENDING_THREADS = 64, 24
_REQUEST_PRICE = 5.0e-6
_SHARDS_A_PAGE = 3000


@dataclass(frozen=True, slots=True)
class Assumed:
    """Seconds and rates of S3, the table and a Lambda with one core."""

    copy_seconds: float = 0.15
    copy_bytes_per_second: float = 100e6  # of one copy, inside S3
    request_seconds: float = 0.05
    lambda_bytes_per_second: float = 75e6  # in, and as much out
    cpu_seconds: float = 0.002  # of one request: signing, parsing
    shard_seconds: float = 0.0001  # of reading one shard's item


@dataclass(frozen=True, slots=True)
class Joined:
    """Cost of joining one object."""

    num_shards: int
    num_segments: int
    num_groups: int
    num_requests: int
    copied_bytes: int
    sent_bytes: int
    seconds: float


def segments_of(num_lines: int, line_bytes: int, row_bytes: int) -> tuple[array[int], int]:
    """Return the segments' bytes of a batch, and its number of shards."""
    limits = ShardLimits().for_file(num_lines * line_bytes)
    shard_lines = max(1, min(limits.max_lines, limits.max_bytes // line_bytes))
    range_lines = ceil(_RANGE_BYTES / line_bytes)
    sizes, num_shards = array("Q"), 0
    for first in range(0, num_lines, range_lines):
        end = min(first + range_lines, num_lines)
        for start in range(first, end, shard_lines):
            sizes.extend(_segments(min(shard_lines, end - start) * row_bytes))
            num_shards += 1
    return sizes, num_shards


def _segments(num_bytes: int) -> Iterator[int]:
    """Yield the segments of a shard's rows, by the rule of `batch.parts`."""
    while num_bytes >= SEGMENT_BYTES + MIN_COPIED_BYTES:
        yield SEGMENT_BYTES
        num_bytes -= SEGMENT_BYTES
    yield num_bytes


def join(sizes: Sequence[int], num_shards: int, assumed: Assumed) -> Joined:
    """Return the cost of joining these segments."""
    groups = list(plan_groups(sizes))
    parts = [
        part for group in groups for part in plan_upload(sizes[group.first : group.end])
    ] + list(plan_upload([group.num_bytes for group in groups] or sizes))
    copies = [part.num_bytes for part in parts if part.is_copy]
    sent = [part for part in parts if not part.is_copy]
    sent_bytes = sum(part.num_bytes for part in sent)
    num_sent = len(sent) + sum(len(part.pieces) for part in sent)
    num_pages = ceil(num_shards / _SHARDS_A_PAGE)
    num_requests = len(copies) + num_sent + 2 * (len(groups) + 1)
    waits = sum(assumed.copy_seconds + size / assumed.copy_bytes_per_second for size in copies)
    waits += 2 * len(groups) * assumed.request_seconds
    slowest = (
        waits / min(_THREADS, max(1, len(groups) or len(copies))),
        num_sent * assumed.request_seconds / _SENDING_THREADS,
        sent_bytes / assumed.lambda_bytes_per_second,
        num_requests * assumed.cpu_seconds,
    )
    reading = num_pages * assumed.request_seconds + num_shards * assumed.shard_seconds
    return Joined(
        num_shards,
        len(sizes),
        len(groups),
        num_requests,
        sum(copies),
        sent_bytes,
        reading + max(slowest),
    )


def row(num_lines: int, line_bytes: int, row_bytes: int, assumed: Assumed) -> str:
    """Return the line of the table for one scenario."""
    done = join(*segments_of(num_lines, line_bytes, row_bytes), assumed)
    cells = (
        f"{num_lines:.0e}, {line_bytes:,} B, {row_bytes:,} B",
        f"{done.num_shards:,}",
        f"{done.num_segments:,}",
        f"{done.num_groups:,}",
        f"{done.num_requests:,}",
        f"{done.sent_bytes / 1e9:,.1f} GB",
        f"{done.seconds / 60:,.1f}",
        f"${done.num_requests * _REQUEST_PRICE:,.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for one scenario, or for those of the docs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int)
    parser.add_argument("--line-bytes", type=int, default=1000)
    parser.add_argument("--row-bytes", type=int, default=1000)
    parsed = parser.parse_args(arguments)
    scenarios = [
        (10**6, 1000, 1000),
        (10**7, 1000, 1000),
        (10**8, 1000, 1000),
        (10**9, 1000, 1000),
        (10**9, 1000, 400),
        (10**9, 400, 20_000),
    ]
    if parsed.lines:
        scenarios = [(parsed.lines, parsed.line_bytes, parsed.row_bytes)]
    print(
        "| lines, bytes of one, of its row | shards | segments | joined first | requests "
        "| through the Lambda | minutes | price |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for scenario in scenarios:
        print(row(*scenario, Assumed()))


if __name__ == "__main__":
    main()
