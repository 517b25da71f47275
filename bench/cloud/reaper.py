"""Reaper over many open batches: calls to AWS and processor time for each batch.

    python -m bench.cloud.reaper --batches 50000

No emulator runs: botocore's requests are answered in this process, as DynamoDB and SQS would
answer, in pages of a megabyte. The reaper, its client and its parsers are measured. All batches
are in progress, of 20 models and 100 tenants; one of a hundred has a live shard. A second run
follows while the reaper has not reached the end of its list.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import boto3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config

from tidemill.batch.model import Batch, Options, Outputs, Shard, Source
from tidemill.batch.states import Status
from tidemill.handler.aws.items import dump, to_item
from tidemill.handler.aws.stores.live import live_item
from tidemill.handler.aws.stores.shards import batch_key
from tidemill.handler.aws.stores.table import ACTIVE, active_name
from tidemill.handler.aws.sync import Aws
from tidemill.handler.control.reaper import reap
from tidemill.handler.deployment import Deployment
from tidemill.handler.observability import logger
from tidemill.handler.settings import read_settings

_NUM_MODELS, _NUM_TENANTS, _NUM_SHARDS = 20, 100, 10
_PAGE_BYTES: Final = 2**20
_NOW: Final = int(time.time())


class _Body(io.BytesIO):
    def stream(self, **_: object) -> Iterator[bytes]:
        """Yield the whole body, as urllib3's responses do in parts."""
        yield self.read()


class FakeServices:
    """Answers the requests of boto3's clients in this process, and counts them by operation."""

    def __init__(self, num_batches: int) -> None:
        self.calls: Counter[str] = Counter()
        self._others: dict[str, str] = {}
        batches = [_batch(number) for number in range(num_batches)]
        self._batches = {
            str(batch_key(batch.id)["pk"]): json.dumps(_item_of(batch)) for batch in batches
        }
        self._live = {
            str(batch_key(batch.id)["pk"]): json.dumps(to_item(live_item(_live_shard(batch))))
            for batch in batches[::100]
        }
        self._names = sorted(active_name(batch) for batch in batches)

    def client(self, service: str, *, config: Config) -> Any:
        """Return a client whose requests are answered here."""
        client = boto3.client(  # noqa: TID251 - answered here
            service,
            region_name="eu-west-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
            config=config,
        )
        client.meta.events.register("before-send.*.*", self._answer)
        return client

    def _answer(self, request: AWSPreparedRequest, **_: object) -> AWSResponse:
        target = request.headers["X-Amz-Target"]
        operation = (target.decode() if isinstance(target, bytes) else target).partition(".")[2]
        self.calls[operation] += 1
        text = self._text(operation, json.loads(request.body or b"{}"))
        return AWSResponse(request.url, 200, {}, _Body(text.encode()))

    def _text(self, operation: str, body: Mapping[str, Any]) -> str:
        match operation:
            case "GetQueueAttributes":
                return '{"Attributes": {"ApproximateNumberOfMessages": "100000"}}'
            case "GetItem":
                item = self._batches.get(key := body["Key"]["pk"]["S"], self._others.get(key))
                return f'{{"Item": {item}}}' if item else "{}"
            case "BatchGetItem":
                [(table, wanted)] = body["RequestItems"].items()
                found = ", ".join(self._batches[key["pk"]["S"]] for key in wanted["Keys"])
                return f'{{"Responses": {{"{table}": [{found}]}}, "UnprocessedKeys": {{}}}}'
            case "UpdateItem":
                placed = body.get("ExpressionAttributeValues", {})
                fields = {name.removeprefix(":set_"): value for name, value in placed.items()}
                item = json.dumps(body["Key"] | fields)
                self._others[body["Key"]["pk"]["S"]] = item
                return f'{{"Attributes": {item}}}'
            case "Query":
                return self._query(body)
        raise AssertionError(operation)

    def _query(self, body: Mapping[str, Any]) -> str:
        values = body["ExpressionAttributeValues"]
        partition = values[":pk"]["S"]
        if partition != ACTIVE:
            has_live = "COUNT" not in values.get(":prefix", {}).get("S", "")
            item = self._live.get(partition) if has_live else None
            return f'{{"Items": [{item or ""}]}}'
        after = body.get("ExclusiveStartKey", {}).get("sk", {}).get("S", "")
        names: list[str] = []
        size = 0
        for name in self._names:
            if name > after and size < _PAGE_BYTES and len(names) < body.get("Limit", 10**9):
                names.append(name)
                size += len(name) + 10
        page: dict[str, Any] = {"Items": [{"sk": {"S": name}} for name in names]}
        if names and names[-1] != self._names[-1]:
            page["LastEvaluatedKey"] = {"pk": {"S": ACTIVE}, "sk": {"S": names[-1]}}
        return json.dumps(page)


def _batch(number: int) -> Batch:
    batch_id = f"batch_{number:032}"
    return Batch(
        batch_id,
        f"tenant-{number % _NUM_TENANTS:02}",
        Source("bucket", f"input/{number}.jsonl", "etag", 10_000),
        f"file-{number}",
        Options(completion_window="24h"),
        Outputs(f"output/{number}.jsonl", f"output/{number}.errors.jsonl", f"{number}.json"),
        _NOW - 3600,
        _NOW + 80_000,
        Status.IN_PROGRESS,
        model=f"model-{number % _NUM_MODELS}",
        in_progress_at=_NOW - 3500,
        num_rows=1000,
        num_shards=_NUM_SHARDS,
        shards_left=_NUM_SHARDS,
        shards_rung=_NUM_SHARDS,
        announced=Status.IN_PROGRESS,
        seen=f"{_NUM_SHARDS} shards left, {number % 100 == 0:d} claims, 0 rows",
        seen_at=_NOW - 600,
    )


def _item_of(batch: Batch) -> dict[str, Any]:
    return to_item(batch_key(batch.id) | dump(batch))


def _live_shard(batch: Batch) -> Shard:
    return Shard(
        batch.id, 0, 1, 100, 0, 1000, owner="worker-1", lease_until=_NOW + 60, fence=1, attempts=1
    )


def measure(num_batches: int, num_runs: int) -> None:
    """Let the reaper look several times, and print what each look took."""
    queues = {f"model-{number}": f"https://sqs/{number}" for number in range(_NUM_MODELS)}
    settings = {
        "TIDEMILL_BUCKET": "bucket",
        "TIDEMILL_TABLE": "table",
        "TIDEMILL_CONTROL_QUEUE": "https://sqs/control",
        "TIDEMILL_WORK_QUEUES": json.dumps(queues),
    }
    services = FakeServices(num_batches)
    aws, deployment = Aws(services.client), Deployment(read_settings(settings))
    for number in range(1, num_runs + 1):
        services.calls.clear()
        cpu, wall = time.process_time(), time.perf_counter()
        num_seen = _reap(aws, deployment)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        num_calls = services.calls.total()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"run {number}: {num_seen:,} of {num_batches:,} batches in {wall:.1f} s, "
            f"{num_calls / num_seen:.2f} calls and {cpu / num_seen * 1000:.2f} ms of processor "
            f"time each, {peak:,.0f} MiB at most: {dict(services.calls.most_common())}"
        )


def _reap(aws: Aws, deployment: Deployment) -> int:
    """Let the reaper look once, and return how many batches it has read."""
    with mock.patch.object(logger, "info") as said:
        reap(aws, deployment, _NOW)
    [reaped] = [call for call in said.call_args_list if call.args == ("reaped",)]
    return int(reaped.kwargs["num_active"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=3)
    parsed = parser.parse_args(arguments)
    measure(parsed.batches, parsed.runs)


if __name__ == "__main__":
    main()
