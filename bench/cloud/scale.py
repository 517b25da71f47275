"""Estimates the load on each AWS service at any size: rates, cost, first quota.

    python -m bench.cloud.scale --workers 1000 --lines 1000000000

Counts come from the code (named next to each), prices and limits from AWS's public lists for
us-east-1 in autumn 2026: check them before you rely on a sum. GPUs are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from bench.cloud.intake import MAX_INTAKE_RUNS, Rates, simulate
from bench.cloud.join import Assumed, join, segments_of
from tidemill.batch.parts import SEGMENT_BYTES
from tidemill.batch.shard_cutter import ShardLimits
from tidemill.handler.worker.context.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Scenario:
    """One batch: its size, and the speed of workers and Lambdas. Bytes are per line."""

    num_workers: int
    num_lines: int
    line_bytes: int
    row_bytes: int
    rows_per_second: float  # of one worker
    intake_lines_per_second: float  # of one Lambda, measured: docs/explanation/benchmarks.md

    @property
    def shard_lines(self) -> int:
        """Lines of one shard, by the first limit that is reached."""
        limits = ShardLimits().for_file(self.num_lines * self.line_bytes)
        return min(limits.max_lines, limits.max_bytes // self.line_bytes)

    @property
    def num_shards(self) -> int:
        """Shards of the batch."""
        return ceil(self.num_lines / self.shard_lines)

    @property
    def run_seconds(self) -> float:
        """Seconds from the first row to the last."""
        return self.num_lines / (self.num_workers * self.rows_per_second)

    @property
    def shard_seconds(self) -> float:
        """Seconds that one worker spends on one shard."""
        return self.shard_lines / self.rows_per_second


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of one kind over the whole batch, their price per million, the limit per second."""

    name: str
    source: str
    requests: float
    price: float
    limit: float | None = None
    limit_name: str = ""


def demands(scenario: Scenario, worker: WorkerConfig) -> list[Demand]:
    """Return the run's load on each service, between the first row and the last."""
    shards, seconds = scenario.num_shards, scenario.shard_seconds
    shard_bytes = scenario.shard_lines * scenario.row_bytes
    flushes = seconds / worker.flush_seconds_for(shards)
    parts = ceil(max(flushes, shard_bytes / worker.flush_bytes))
    segments = ceil(shard_bytes / SEGMENT_BYTES)
    ticks = seconds / worker.tick_seconds
    renewals = max(parts, seconds / (worker.lease_seconds / 3))
    partition = "of one partition, which a batch is"
    return [
        Demand("SQS requests", "send in tens, receive, hide, delete",
               shards * (0.1 + 1 + seconds / (worker.visibility_seconds / 3) + 1), 0.40),
        Demand("SQS in flight", "one message a shard that is run or next",
               scenario.num_workers * 2 * scenario.run_seconds, 0, 120_000, "messages of a queue"),
        Demand("DynamoDB reads", "the batch at each tick, claim and commit; a look each minute",
               shards * (ticks + 2 + 2 + 1)
               + scenario.run_seconds / 60 * _look_units(scenario), 0.125, 3000, partition),
        Demand("DynamoDB writes", "plan, renewals; a claim of two items in a transaction, a commit"
               " of three", shards * (1 + 4 + renewals + 6), 0.625, 1000, partition),
        Demand("DynamoDB writes of history", "of each worker's batch, a bucket a minute",
               scenario.num_workers * scenario.run_seconds / 60, 0.625, 1000, partition),
        Demand("DynamoDB writes to the index", "a batch's moves, turns and notes; no commit",
               2 * (40 + scenario.run_seconds / 300), 0.625, 1000, "of one tenant"),
        Demand("S3 PUT and LIST", "parts, segments and their index, one listing a claim",
               shards * (parts + segments + 2), 5.00, 3500, "of one prefix before S3 splits it"),
        Demand("S3 GET", "the input's range, and every part when it is sealed",
               shards * (1 + parts), 0.40, 5500, "of one prefix before S3 splits it"),
    ]  # fmt: skip


def _look_units(scenario: Scenario) -> float:
    """Return the units that one read takes: 300 bytes per live shard, two per worker."""
    return 1 + scenario.num_workers * 2 * 300 / 4096 + 1


def report(scenario: Scenario, worker: WorkerConfig) -> list[str]:
    """Return the lines of the table and of the text around it."""
    run_seconds = scenario.run_seconds
    lines = [
        (
            f"{scenario.num_lines:,} lines in {scenario.num_shards:,} shards on "
            f"{scenario.num_workers:,} workers of {scenario.rows_per_second:g} rows/s: "
            f"{run_seconds / 3600:.1f} h"
        ),
        "| what | a second | limit | used | price |",
        "|---|---:|---:|---:|---:|",
    ]
    found = demands(scenario, worker)
    for demand in found:
        rate = demand.requests / run_seconds
        limit = f"{demand.limit:,.0f} ({demand.limit_name})" if demand.limit else "none"
        used = f"{rate / demand.limit:.1%}" if demand.limit else ""
        price = f"${demand.requests / 1e6 * demand.price:,.2f}"
        lines.append(
            f"| {demand.name}: {demand.source} | {rate:,.0f} | {limit} | {used} | {price} |"
        )
    bounded = [demand for demand in found if demand.limit]
    first = max(bounded, key=lambda demand: demand.requests / (demand.limit or 1))
    most = (first.limit or 0) / (first.requests / run_seconds) * scenario.num_workers
    stored = scenario.num_lines * scenario.row_bytes
    rates = Rates(scenario.intake_lines_per_second, 1_000_000)
    intake = simulate(scenario.num_lines, scenario.line_bytes, MAX_INTAKE_RUNS, rates)
    joined = join(
        *segments_of(scenario.num_lines, scenario.line_bytes, scenario.row_bytes), Assumed()
    )
    join_price = joined.seconds * 2 * 0.0000166667  # 2 GB each
    # As parts, as segments, and as the merged segments on their way to one object.
    times = 3 if joined.num_groups else 2
    lines += [
        f"First limit: {first.name}, at about {most:,.0f} workers on one batch.",
        (
            f"Intake reads it in {intake.total / 60:.0f} minutes "
            f"({intake.num_ranges:,} ranges, {MAX_INTAKE_RUNS} at once): ${intake.price:,.2f}; "
            f"finalize joins it in {joined.seconds / 60:.0f} minutes "
            f"({ceil(joined.seconds / 840)} runs): ${join_price:,.2f}."
        ),
        f"Rows under work/ for three days: ${times * stored / 2**30 * 0.023 / 10:,.2f}.",
        f"All requests: ${sum(demand.requests / 1e6 * demand.price for demand in found):,.2f}.",
    ]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=10**9)
    parser.add_argument("--line-bytes", type=int, default=1000)
    parser.add_argument("--row-bytes", type=int, default=1000)
    parser.add_argument("--rows-per-second", type=float, default=50)
    parser.add_argument("--intake-lines-per-second", type=float, default=30_000)
    parsed = parser.parse_args(arguments)
    scenario = Scenario(
        parsed.workers,
        parsed.lines,
        parsed.line_bytes,
        parsed.row_bytes,
        parsed.rows_per_second,
        parsed.intake_lines_per_second,
    )
    print("\n".join(report(scenario, WorkerConfig(queue="work"))))


if __name__ == "__main__":
    main()
