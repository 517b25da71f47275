"""Runs a batch to its end without a worker: each line gets a status."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from tests.handler.finalize.rig import fail, plenty
from tests.handler.intake.rig import Cloud
from tidemill.batch.file.lines import RawLine, parse_line
from tidemill.batch.file.rows import print_reply
from tidemill.batch.model import Batch
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.states import Status
from tidemill.handler.finalize.finalize import finalize
from tidemill.handler.lambdas.intake import handle_message


def rows_of(cloud: Cloud, batch: Batch, statuses: Mapping[str, int]) -> list[FinishedRow]:
    """Return the answers to a batch's lines: their bodies, or errors of some status."""
    rows = []
    data = cloud.run(cloud.deployment.bucket.get(batch.source.key))
    for number, text in enumerate(data.splitlines(), start=1):
        line = parse_line(RawLine(number, text))
        status = statuses.get(line.custom_id, 200)
        choice = {"message": {"role": "assistant", "content": json.dumps(line.body)}}
        body: dict[str, Any] = {"choices": [choice | {"finish_reason": "stop"}]}
        if status != 200:
            body = {"error": {"message": f"no {line.custom_id}", "type": "t"}}
        row = print_reply(line, status, body)
        rows.append(FinishedRow(number, row, is_success=status == 200))
    return rows


def run_to_end(cloud: Cloud, batch: Batch, statuses: Mapping[str, int]) -> Batch:
    """Run the only shard of a batch as a worker, and finalize the batch."""
    if batch.status is Status.FINALIZING:
        return finalized(cloud, batch)
    bucket, table = cloud.deployment.bucket, cloud.deployment.table
    shard = cloud.claim(batch.id)
    cloud.run(bucket.put_part(shard, 0, encode_part(rows_of(cloud, batch, statuses))))
    index = cloud.run(bucket.index_parts(batch.id, 0, left_out=fail))
    seal = index.seal()
    cloud.run(bucket.put_segments(shard, seal))
    sizes = [[each.num_bytes for each in side] for side in (seal.output, seal.errors)]
    cloud.run(
        table.commit(shard, progress=index.progress(), output_sizes=sizes[0], error_sizes=sizes[1])
    )
    now = int(time.time())
    cloud.run(table.move_batch(batch.id, Status.FINALIZING, now, outcome="completed"))
    return finalized(cloud, batch)


def finalized(cloud: Cloud, batch: Batch) -> Batch:
    """Handle what finalize and intake ring for until the batch has ended."""
    for _ in range(10):
        finalize(cloud.aws, cloud.deployment, cloud.batch(batch.id), plenty)
        for message in cloud.messages(cloud.deployment.intake):
            handle_message(cloud.aws, cloud.deployment, to_json(message).decode(), plenty)
        if cloud.batch(batch.id).is_terminal:
            break
    return cloud.batch(batch.id)
