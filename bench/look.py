"""What a look at a batch costs this process, however many shards it has: calls, bytes, time.

    python -m bench.look --live 2000

Answers are as DynamoDB's but come from memory: what is measured is our own time and that of
botocore, which reads them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from handler.aws.items import to_item
from handler.aws.stores.live import count_key, live_item
from handler.aws.stores.table import Table
from handler.aws.sync import Aws, aws_client
from handler.batch.live import Standing
from handler.batch.model import Batch, Options, Outputs, Progress, Shard, Source

_PAGE_BYTES = 2**20
_EXPIRES = 1_800_000_000
_PROGRESS = Progress(3210, 17, 1_234_567, 345_678, 234_567, 81.125, 49.5, 3712.25)


@dataclass(frozen=True, slots=True)
class Look:
    """One look: how many reads it took, of how many bytes, and the seconds of ours."""

    num_reads: int
    num_bytes: int
    seconds: float
    standing: Standing


def batch_of(num_shards: int) -> Batch:
    """Return a batch that runs and has so many shards."""
    batch_id = f"batch_{'0123456789abcdef' * 2}"
    source = Source("bucket", "input/x.jsonl", '"etag"', num_shards * 4_096_000)
    outputs = Outputs("output/x.jsonl", "output/x.errors.jsonl", "output/x.batch.json")
    return Batch(
        batch_id, "default", source, "file-x", Options(), outputs, 0, 1,
        num_rows=4096 * num_shards, num_shards=num_shards, shards_left=num_shards,
        expires=_EXPIRES,
    )  # fmt: skip


class Answers:
    """Answers the queries of a look at a batch: live shards in pages, then counts."""

    def __init__(self, batch: Batch, num_live: int) -> None:
        shards = [
            Shard(
                batch.id, batch.num_shards - number - 1, 1, 4096, 0, 1, owner="0" * 32,
                lease_until=1_790_000_000.5, fence=1, attempts=1, progress=_PROGRESS,
                expires=_EXPIRES,
            )
            for number in range(num_live)
        ]  # fmt: skip
        # What is read counts for the megabyte of a page, what is asked for is sent.
        room = _PAGE_BYTES // max([1, *(len(json.dumps(live_item(each))) for each in shards[:1])])
        states = [{"state": to_item(live_item(each))["state"]} for each in shards]
        pages = [states[at : at + room] for at in range(0, len(states), room)] or [[]]
        last = to_item({"pk": "p", "sk": "s"})
        self.bodies = [
            _body(page, None if number == len(pages) - 1 else last)
            for number, page in enumerate(pages)
        ]
        counts = [_counts(batch, number, num_live) for number in range(8)]
        self.bodies.append(_body(counts, None))
        self.num_reads = 0

    def __call__(self, request: AWSPreparedRequest, **_: object) -> AWSResponse:
        """Return the next answer."""
        body = self.bodies[self.num_reads % len(self.bodies)]
        self.num_reads += 1
        headers = {"Content-Type": "application/x-amz-json-1.0", "Content-Length": str(len(body))}
        return AWSResponse(request.url, 200, headers, _Raw(body))


class _Raw:
    """The body of an answer, as botocore reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, **_: object) -> Sequence[bytes]:
        """Return all of it, in one piece."""
        return [self._body]


def _counts(batch: Batch, number: int, num_live: int) -> dict[str, Any]:
    shard = Shard(batch.id, number, 1, 4096, 0, 1, expires=_EXPIRES)
    last = {f"last{slot}": number + 8 * slot for slot in range(16)}
    done = {"num_shards": (batch.num_shards - num_live) // 8}
    counts = {"completed": 123_456_789, "failed": 1234, "prompt_tokens": 23_456_789_012}
    return to_item(count_key(shard) | last | done | counts | {"gpu_seconds": 2_345_678.125})


def _body(items: Sequence[object], last: object) -> bytes:
    fields = {"Items": items, "Count": len(items)} | ({"LastEvaluatedKey": last} if last else {})
    return json.dumps(fields).encode()


def look(num_shards: int, num_live: int, rounds: int = 21) -> Look:
    """Return what a look at a batch with so many shards takes, the median of some rounds."""
    batch = batch_of(num_shards)
    answers = Answers(batch, num_live)
    signs = {"region_name": "us-east-1", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    aws = Aws(lambda service, **options: aws_client(service, **signs, **options))
    aws.clients["dynamodb"].meta.events.register("before-send", answers)
    table, spent = Table("table"), []
    for _ in range(rounds):
        answers.num_reads = 0
        began = time.perf_counter()
        standing = aws.run(table.stand(batch))
        standing.progress(1_780_000_000)
        spent.append(time.perf_counter() - began)
    return Look(answers.num_reads, sum(map(len, answers.bodies)), median(spent), standing)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of live shards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shards", type=int, default=244_141)
    parser.add_argument("--live", type=int, nargs="+", default=[10, 100, 2000])
    parsed = parser.parse_args(arguments)
    print("| shards | live | reads | bytes | ms |\n|---:|---:|---:|---:|---:|")
    for num_live in parsed.live:
        found = look(parsed.shards, num_live)
        print(
            f"| {parsed.shards:,} | {num_live:,} | {found.num_reads} | {found.num_bytes:,} |"
            f" {1000 * found.seconds:.1f} |"
        )


if __name__ == "__main__":
    main()
