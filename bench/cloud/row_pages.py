"""Pages of rows on the dashboard: calls, bytes and time of a search in a large batch.

The bucket and the table are simulated: rows are made when they are read, and each call takes
`--latency-ms`.

    python -m bench.cloud.row_pages --rows 1000000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from pydantic_core import to_json

from tidemill.batch.model import Shard, ShardStatus, Source
from tidemill.batch.progress_counts import Progress
from tidemill.batch.shard_cutter import MAX_SHARD_LINES
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.row_view import row_view
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.sync import Aws
from tidemill.handler.queries.part_cache import PartCache
from tidemill.handler.queries.row_requests import read_requests
from tidemill.handler.queries.row_search import search_rows

ROW_BYTES = 512
FAILED_EVERY, TRUNCATED_EVERY = 1000, 997
PAGE_ROWS = 25


def kind_of(line: int) -> str:
    """Return the status of a line's row."""
    if line % FAILED_EVERY == 0:
        return "failed"
    return "truncated" if line % TRUNCATED_EVERY == 0 else "ok"


def row_of(line: int) -> bytes:
    """Return the row of a line, all of one size."""
    reason = "length" if kind_of(line) == "truncated" else "stop"
    body: dict[str, Any] = {
        "choices": [{"message": {"content": f"answer {line}"}, "finish_reason": reason}]
    }
    if kind_of(line) == "failed":
        body = {"error": {"code": "bad", "message": "No."}}
    status = 400 if kind_of(line) == "failed" else 200
    row = {"id": "r", "custom_id": f"c{line}", "response": {"status_code": status, "body": body}}
    return to_json(row).ljust(ROW_BYTES - 1) + b"\n"


class Cloud(Aws):
    """Answers the calls of a search for a batch of this many rows."""

    def __init__(self, num_rows: int, latency_seconds: float) -> None:
        super().__init__()
        self._latency_seconds = latency_seconds
        self.num_calls = self.num_bytes = self.num_rounds = 0
        firsts = range(1, num_rows + 1, MAX_SHARD_LINES)
        self.shards = [self._shard(number, first, num_rows) for number, first in enumerate(firsts)]
        self.deployment: Any = SimpleNamespace(bucket=Bucket("b"), table=self)

    def run(self, operation: Any) -> Any:
        """Run an operation; each of its calls waits for the one before."""
        num_calls = self.num_calls
        result = super().run(operation)
        self.num_rounds += self.num_calls - num_calls
        return result

    def run_all(self, operations: Any) -> Any:
        """Run operations concurrently: with latency in threads, otherwise one after the other."""
        if self._latency_seconds:
            return super().run_all(operations)
        before, rounds, results = self.num_rounds, [0], []
        for operation in operations:
            self.num_rounds = 0
            results.append(self.run(operation))
            rounds.append(self.num_rounds)
        self.num_rounds = before + max(rounds)
        return results

    def reset(self) -> None:
        """Count from zero."""
        self.num_calls = self.num_bytes = self.num_rounds = 0

    def figures(self) -> str:
        """Return calls, rounds of concurrent calls (without latency) and bytes."""
        rounds = "" if self._latency_seconds else self.num_rounds
        return f"{self.num_calls:6} {rounds:6} {self.num_bytes / 1e6:7.2f}"

    @staticmethod
    def _shard(number: int, first: int, num_rows: int) -> Shard:
        lines = range(first, min(first + MAX_SHARD_LINES, num_rows + 1))
        kinds = [kind_of(line) for line in lines]
        num_failed = kinds.count("failed")
        sizes = ((len(lines) - num_failed) * ROW_BYTES,), (num_failed * ROW_BYTES,)
        start = (first - 1) * ROW_BYTES
        return Shard(
            "batch", number, first, len(lines), start, start + len(lines) * ROW_BYTES,
            status=ShardStatus.DONE, fence=1, output_sizes=sizes[0],
            error_sizes=sizes[1] if num_failed else (),
            progress=Progress(
                len(lines) - num_failed, num_failed, truncated=kinds.count("truncated")
            ),
        )  # fmt: skip

    def get_shard(self, _batch_id: str, number: int) -> Any:
        """Return one shard."""
        yield Call("dynamodb", "get_item", {})
        return self.shards[number]

    def list_shards_page(self, _batch_id: str, first: int = 0, limit: int = 64) -> Any:
        """Return shards, and the number of the next one."""
        yield Call("dynamodb", "query", {})
        end = first + limit
        return self.shards[first:end], end if end < len(self.shards) else None

    def _send(self, call: Call) -> Mapping[str, Any]:
        time.sleep(self._latency_seconds)
        self.num_calls += 1
        if call.service == "dynamodb":
            return {}
        key, wanted = call.arguments["Key"], call.arguments.get("Range")
        body = self._object(key, wanted)
        self.num_bytes += len(body)
        return {"Body": body, "ContentRange": wanted} if wanted else {"Body": body}

    def _object(self, key: str, wanted: str | None) -> bytes:
        start, end = (int(text) for text in wanted[6:].split("-")) if wanted else (0, 0)
        if key == "input":
            lines = range(start // ROW_BYTES + 1, end // ROW_BYTES + 2)
            return b"".join(row_of(line) for line in lines)
        number = next(int(part) for part in key.split("/") if part.isdecimal())
        shard = self.shards[number]
        lines = range(shard.first_line, shard.first_line + shard.num_rows)
        failed, others = _by_kind(lines)
        if not wanted:
            truncated = [line for line in lines if kind_of(line) == "truncated"]
            index = {"output": [[(line, ROW_BYTES) for line in others]]}
            index["errors"] = [[(line, ROW_BYTES) for line in failed]] if failed else []
            return to_json({"format": 1, **index, "truncated": truncated})
        some = (failed if "errors" in key else others)[start // ROW_BYTES : end // ROW_BYTES + 1]
        return b"".join(map(row_of, some))


@cache
def _by_kind(lines: range) -> tuple[list[int], list[int]]:
    """Return the lines with failed rows, and the others."""
    failed = [line for line in lines if kind_of(line) == "failed"]
    return failed, [line for line in lines if kind_of(line) != "failed"]


def batch_of(cloud: Cloud, num_rows: int) -> Any:
    """Return the batch whose rows the cloud has."""
    source = Source("b", "input", "e", num_rows * ROW_BYTES)
    return SimpleNamespace(
        id="batch",
        created_ns=0,
        num_rows=num_rows,
        num_shards=len(cloud.shards),
        is_terminal=True,
        source=source,
        output_file_id=None,
        error_file_id=None,
    )


def queries(num_rows: int) -> Mapping[str, RowQuery]:
    """Return the kinds of pages."""
    middle = num_rows // 2
    return {
        "failed, first page": RowQuery(status="failed"),
        "truncated, first page": RowQuery(status="truncated"),
        "all, in the middle": RowQuery(after=middle),
        "one line": RowQuery(line=middle),
        "text, no match": RowQuery(text="nothing", after=middle),
    }


def main() -> None:
    """Measure each kind of page, the first and a repeated one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    args = parser.parse_args()
    # Without latency, other work of the machine does not count.
    clock = time.perf_counter if args.latency_ms else time.process_time
    cloud = Cloud(args.rows, args.latency_ms / 1000)
    batch, middle = batch_of(cloud, args.rows), args.rows // 2
    print(f"{'page':24} {'rows':>5} {'calls':>6} {'rounds':>6} {'MB':>7} {'ms':>7} {'again':>7}")
    for name, query in queries(args.rows).items():
        cache, figures = PartCache(), []
        counted = ""
        for _ in range(2):
            cloud.reset()
            begin = clock()
            found = search_rows(cloud, cloud.deployment, batch, cache, query, limit=PAGE_ROWS)
            for line, row in found.rows:
                row_view(line, row)
            figures.append(1000 * (clock() - begin))
            counted = counted or cloud.figures()
        print(f"{name:24} {len(found.rows):5} {counted} {figures[0]:7.0f} {figures[1]:7.0f}")
    cache = PartCache()
    for name in ("requests", "requests again"):
        cloud.reset()
        begin = clock()
        lines = range(middle, middle + PAGE_ROWS)
        num_read = len(read_requests(cloud, cloud.deployment, batch, cache, lines))
        took = 1000 * (clock() - begin)
        print(f"{name:24} {num_read:5} {cloud.figures()} {took:7.0f}")


if __name__ == "__main__":
    main()
