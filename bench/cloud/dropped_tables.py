"""Dropped tables on one machine: rows rendered and made a table by intake's Lambda code.

    python -m bench.cloud.dropped_tables --rows 100000 1000000

Both read from and write to an emulator's bucket, whose own work is beside them: what counts is the
rate of their processor time. A row has a text of some 280 bytes, and an answer of as many. Nothing
of it is the model's.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json, to_json

from tests.emulators import running
from tests.handler.intake.rig import Cloud
from tidemill.batch.model import File
from tidemill.batch.states import Status
from tidemill.handler.finalize.table import make_table
from tidemill.handler.intake.intake import ingest

_RECIPE: Final = b"prompt = 'Label: {{ text }}'\nid = 'review_id'\nparams = {max_tokens = 64}\n"
_KEY: Final = "input/reviews.parquet"
_GROUP_ROWS: Final = 100_000
_fork = multiprocessing.get_context("fork")


def put_table(cloud: Cloud, num_rows: int) -> None:
    """Drop a table and its recipe."""
    words, draw = [f"word{number}" for number in range(5000)], random.Random(1)
    schema = pa.schema([("review_id", pa.string()), ("text", pa.string())])
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema) as writer:
        for start in range(0, num_rows, _GROUP_ROWS):
            numbers = range(start, min(num_rows, start + _GROUP_ROWS))
            texts = [" ".join(draw.choices(words, k=31)) for _ in numbers]
            writer.write_table(pa.table([[str(each) for each in numbers], texts], schema=schema))
    cloud.put(_RECIPE, "input/reviews.recipe.toml")
    cloud.put(sink.getvalue(), _KEY)


def answers(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the row of each line, which says what was asked."""
    usage = {"prompt_tokens": 70, "completion_tokens": 64, "total_tokens": 134}
    for line in lines:
        asked = from_json(line)
        message = {"role": "assistant", "content": asked["body"]["messages"][0]["content"]}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        response = {"status_code": 200, "body": {"choices": choices, "usage": usage}}
        row = {"id": "r", "custom_id": asked["custom_id"], "response": response, "error": None}
        yield to_json(row) + b"\n"


def publish_rows(cloud: Cloud, batch_id: str) -> None:
    """Do what workers and finalize do, up to the table."""
    batch, table = cloud.batch(batch_id), cloud.deployment.table
    lines = cloud.run(cloud.deployment.bucket.get(batch.source.key)).splitlines()
    rows, now = b"".join(answers(lines)), int(time.time())
    cloud.run(cloud.deployment.bucket.put(batch.outputs.output_key, rows))
    file = File("file-rows", batch.tenant, batch.outputs.output_key, len(rows), now, "r", "batch")
    cloud.run(cloud.deployment.files.put_file(file))
    if batch.status is Status.VALIDATING:  # a file of several ranges, which others would scan
        cloud.run(table.move_batch(batch_id, Status.IN_PROGRESS, now))
    done = Status.COMPLETED
    cloud.run(
        table.move_batch(batch_id, Status.FINALIZING, now, outcome=done, output_file_id=file.id)
    )


def measure(what: str, num_rows: int, work: Callable[[], object]) -> None:
    """Run in a process of its own, and print its rate and its memory."""

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        work()
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        peak = after.ru_maxrss >> 10
        print(f"{what}: {num_rows / used:,.0f} rows a second of processor time, {peak} MiB")

    in_process(run)


def in_process(work: Callable[[], object]) -> None:
    """Run in a process of its own, whose memory is nobody else's."""
    process = _fork.Process(target=work)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def main() -> None:
    """Measure each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    with tempfile.TemporaryDirectory() as folder, running("ministack", Path(folder)) as emulator:
        for num_rows in parser.parse_args().rows:
            cloud = Cloud.on(emulator)
            in_process(partial(put_table, cloud, num_rows))
            batch = cloud.create(cloud.run(cloud.deployment.bucket.get(_KEY)), _KEY)

            def take_in(cloud: Cloud = cloud, batch_id: str = batch.id) -> None:
                ingest(cloud.aws, cloud.deployment, cloud.batch(batch_id), lambda: 900.0)

            def make(cloud: Cloud = cloud, batch_id: str = batch.id) -> None:
                make_table(cloud.aws, cloud.deployment, batch_id, lambda: 900.0)
                assert cloud.batch(batch_id).table_file_id, cloud.batch(batch_id).errors

            measure(f"{num_rows:,} rows rendered (and checked, up to one range)", num_rows, take_in)
            in_process(partial(publish_rows, cloud, batch.id))
            measure(f"{num_rows:,} rows made a table", num_rows, make)


if __name__ == "__main__":
    main()
