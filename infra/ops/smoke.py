"""`python -m infra.ops.smoke`: tests a deployment as users would: drop, follow, compare, cancel.

It uses real workers, and costs a few minutes of their time. It leaves only log lines, and batches
in the table, which expire.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError

from infra.config import DEFAULT_PATH, ConfigRefused, read_config
from infra.ops.client import Api, ApiFailed
from infra.ops.drops import Drops
from infra.ops.outputs import NotDeployed, Outputs, read_outputs
from infra.ops.record import Record, recording
from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus
from tidemill.batch.object_keys import DROP_TENANT
from tidemill.handler.aws.sync import Aws, aws_client
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.launchers import launcher_for
from tidemill.handler.fleet.stop import list_workers
from tidemill.handler.settings import read_settings
from tidemill.handler.tenants.keys import KeyStore, key_id_of

_MIB = 2**20


def time_copies(s3: Any, bucket: str, *, part_mib: int = 16, count: int = 32) -> str:
    """Return how long concurrent copies of a part take, and one of them all; `s3` is boto3's.

    It leaves nothing behind.
    """
    stem = f"work/smoke/{uuid4().hex}"
    part, whole = f"{stem}/part", f"{stem}/whole"
    try:
        s3.put_object(Bucket=bucket, Key=part, Body=bytes(part_mib * _MIB))
        with _upload(s3, bucket, whole) as upload:
            many_seconds = _copy(s3, upload, part, count)
            parts = [
                {"PartNumber": each["PartNumber"], "ETag": each["ETag"]}
                for each in s3.list_parts(**upload)["Parts"]
            ]
            s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        with _upload(s3, bucket, f"{stem}/again") as upload:
            one_seconds = _copy(s3, upload, whole, 1)
    finally:
        for key in (part, whole):
            s3.delete_object(Bucket=bucket, Key=key)
    return (
        f"S3 copied {count} parts of {part_mib} MiB at once in {many_seconds:.1f} s, and one of "
        f"{count * part_mib} MiB in {one_seconds:.1f} s"
    )


@contextmanager
def _upload(s3: Any, bucket: str, key: str) -> Iterator[dict[str, str]]:
    """Start an upload, and abort it after the block unless it was completed."""
    where = {"Bucket": bucket, "Key": key}
    where["UploadId"] = s3.create_multipart_upload(**where)["UploadId"]
    try:
        yield where
    finally:
        uploads = s3.list_multipart_uploads(Bucket=bucket, Prefix=key).get("Uploads", ())
        if uploads:
            s3.abort_multipart_upload(**where)


def _copy(s3: Any, upload: dict[str, str], source: str, count: int) -> float:
    """Copy an object as that many parts at once and return the seconds."""

    def copy(number: int) -> None:
        s3.upload_part_copy(
            **upload, PartNumber=number, CopySource={"Bucket": upload["Bucket"], "Key": source}
        )

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(copy, range(1, count + 1)))
    return time.perf_counter() - began


_POLL_SECONDS = 2.0


class Workers:
    """Lists and stops workers by the launcher that starts them."""

    def __init__(self, aws: Aws, deployment: Deployment, model: str) -> None:
        self._aws, self._deployment, self._model = aws, deployment, model

    @property
    def plan(self) -> FleetPlan:
        """The model's current fleet plan; raises NotDeployed if there is none."""
        plans = self._aws.run(self._deployment.fleet_plans.read())
        if self._model not in plans:
            raise NotDeployed(f"there is no fleet plan for {self._model}: deploy all stacks")
        return plans[self._model]

    def list_workers(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return self._aws.run(list_workers(self._deployment, self.plan))

    def stop_one(self) -> Worker | None:
        """Stop the worker that has run longest, and return it; None if none runs."""
        running_ones = [each for each in self.list_workers() if each.status is WorkerStatus.RUNNING]
        chosen = min(running_ones, key=lambda each: each.started_at or 0, default=None)
        if chosen is not None:
            plan = self.plan
            self._aws.run(launcher_for(self._deployment, plan.launcher).stop(plan, chosen))
        return chosen

    def wait(self, until: Callable[[Sequence[Worker]], bool], seconds: float) -> float | None:
        """Return the seconds until `until` was true for the workers; None if it never was."""
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            if until(self.list_workers()):
                return passed
            time.sleep(_POLL_SECONDS)
        return None


_NUM_LINES = 20
# More lines than a worker can run while a cancel takes effect.
_NUM_LINES_TO_CANCEL = 50_000
_BAD_LINE = b'{"custom_id": "bad"\n'


class SmokeFailed(Exception):
    """The deployment failed a check; the message has the expected and the actual result."""


class SmokeTest:
    """Smoke test of a deployment; `seconds` is the timeout of a batch with a cold start."""

    def __init__(self, api: Api, drops: Drops, model: str, seconds: float) -> None:
        self._api, self._drops, self._model, self._seconds = api, drops, model, seconds
        self._names: list[str] = []

    def run(self) -> Iterator[str]:
        """Run the checks in order and yield a sentence for each; raises SmokeFailed, ApiFailed."""
        yield self._rows_come_back()
        yield self._bad_file_is_refused()
        yield self._cancel_keeps_rows()

    def watch(self, workers: Workers) -> Iterator[str]:
        """Check that workers start and end; raises SmokeFailed, ApiFailed."""
        yield self._stopped_worker_is_replaced(workers)
        seconds = workers.wait(lambda listed: not listed, self._seconds)
        if seconds is None:
            raise SmokeFailed("workers: still running without work")
        yield f"the last worker ended by itself after {seconds:.0f} s"

    def reports(self) -> dict[str, Any]:
        """Return the reports of the batches that have ended, with the times of their states."""
        return {name: self._drops.report(name) for name in self._names}

    def clean_up(self) -> None:
        """Delete dropped files and their results."""
        for name in self._names:
            self._drops.remove(name)

    def _rows_come_back(self) -> str:
        started = time.monotonic()
        name, url = self._drop(_lines(self._model, _NUM_LINES))
        batch = self._api.follow(url, seconds=self._seconds)
        _expect("status", batch["status"], "completed")
        rows = self._drops.rows(name)
        _expect("ids", [row["custom_id"] for row in rows], _custom_ids(_NUM_LINES))
        _expect("status codes", {row["response"]["status_code"] for row in rows}, {200})
        counts = {"total": _NUM_LINES, "completed": _NUM_LINES, "failed": 0}
        _expect("counts", batch["request_counts"], counts)
        report = self._drops.report(name)
        _expect("report", (report or {}).get("request_counts"), counts)
        return f"{_NUM_LINES} lines became rows in order, {time.monotonic() - started:.0f} s"

    def _bad_file_is_refused(self) -> str:
        _, url = self._drop(_lines(self._model, 1) + _BAD_LINE)
        batch = self._api.follow(url, seconds=self._seconds)
        _expect("status", batch["status"], "failed")
        errors = [(error["code"], error["line"]) for error in batch["errors"]["data"]]
        _expect("errors", errors, [("invalid_json_line", 2)])
        return "a file with an invalid line failed with the line's number"

    def _stopped_worker_is_replaced(self, workers: Workers) -> str:
        """Stop a worker with rows, as a new release does, and check that its batch continues."""
        _, url = self._drop(_lines(self._model, _NUM_LINES_TO_CANCEL))
        batch = self._followed_to(url, 1)
        releases = {worker.release for worker in workers.list_workers()}
        _expect("releases", releases, {workers.plan.release})
        stopped = workers.stop_one()
        if stopped is None:
            raise SmokeFailed("workers: rows arrive, but the launcher lists no running worker")
        gone = workers.wait(
            lambda listed: stopped.id not in {worker.id for worker in listed}, self._seconds
        )
        if gone is None:
            raise SmokeFailed(f"workers: {stopped.id} was stopped but is still running")
        # The rows that it had, and one more than it can have handed over.
        started = time.monotonic()
        counts = self._api.batch(batch["id"])["request_counts"]
        self._followed_to(url, counts["completed"] + 1)
        seconds = time.monotonic() - started
        self._api.cancel(batch["id"])
        self._api.follow(url, seconds=self._seconds)
        return (
            f"a stopped worker was gone after {gone:.0f} s, and {seconds:.0f} s later "
            "its batch continued"
        )

    def _followed_to(self, url: str, num_rows: int) -> dict[str, Any]:
        """Return a batch as soon as it has that many rows."""
        return self._api.follow(
            url,
            seconds=self._seconds,
            until=lambda batch: batch["request_counts"]["completed"] >= num_rows,
        )

    def _cancel_keeps_rows(self) -> str:
        name, url = self._drop(_lines(self._model, _NUM_LINES_TO_CANCEL))
        batch = self._followed_to(url, 1)
        started = time.monotonic()
        self._api.cancel(batch["id"])
        batch = self._api.follow(url, seconds=self._seconds)
        seconds = time.monotonic() - started
        _expect("status", batch["status"], "cancelled")
        num_rows = batch["request_counts"]["completed"]
        _expect("rows kept", len(self._drops.rows(name)), num_rows)
        return f"a cancel took {seconds:.0f} s and retained the {num_rows:,} finished rows"

    def _drop(self, body: bytes) -> tuple[str, str]:
        # Outside any folder, which could be the name of another tenant.
        name = f"smoke-{uuid4().hex}"
        self._names.append(name)
        return name, self._drops.drop(name, body)


def _lines(model: str, count: int) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    return b"".join(
        json.dumps(
            {
                "custom_id": custom_id,
                "method": "POST",
                "url": "/v1/chat/completions",
                # Different seeds prevent identical requests from being answered once for all.
                "body": body | {"seed": number, "temperature": 1.0},
            }
        ).encode()
        + b"\n"
        for number, custom_id in enumerate(_custom_ids(count))
    )


def _custom_ids(count: int) -> list[str]:
    return [f"smoke-{number}" for number in range(count)]


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SmokeFailed(f"{what}: expected {wanted!r}, found {found!r}")


@contextmanager
def temporary_key(outputs: Outputs) -> Iterator[str]:
    """Create an API key that is revoked when the block is left."""
    aws, keys = Aws(), KeyStore(outputs.table)
    token = aws.run(keys.create(tenant=DROP_TENANT, name="smoke", now=int(time.time())))
    try:
        yield token
    finally:
        aws.run(keys.revoke(key_id_of(token), now=int(time.time())))


def smoke(
    name: str,
    *,
    seconds: float,
    model: str | None = None,
    notify: Callable[[str], None],
    record: Record | None = None,
) -> None:
    """Test the deployment with this name; raises SmokeFailed, ApiFailed, NotDeployed."""
    outputs = read_outputs(aws_client("cloudformation"), name)
    s3 = aws_client("s3")
    drops = Drops(s3, outputs.bucket)
    model = model or next(iter(outputs.work_queues))
    workers = Workers(Aws(), Deployment(read_settings(outputs.environment)), model)
    with temporary_key(outputs) as key, closing(Api(outputs.api_url, key)) as api:
        visit = SmokeTest(api, drops, model, seconds)
        try:
            for sentence in chain(visit.run(), visit.watch(workers)):
                notify(sentence)
        finally:
            if record:
                record.write("batches", visit.reports())
            visit.clean_up()
    notify(time_copies(s3, outputs.bucket))


def _recording(folder: Path | None, name: str) -> AbstractContextManager[Record | None]:
    return recording(folder, name, aws_client) if folder else nullcontext()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected checks; return 0 if all succeed."""
    parser = argparse.ArgumentParser(prog="python -m infra.ops.smoke", description=__doc__)
    parser.add_argument("--config", type=Path, default=DEFAULT_PATH)
    parser.add_argument(
        "--deployment", help="use this deployment (default: the one of the configuration)"
    )
    parser.add_argument("--model", help="use this model (default: the first one)")
    parser.add_argument(
        "--seconds", type=float, default=2700, help="timeout of a batch with a cold start (2700)"
    )
    parser.add_argument("--record", type=Path, help="write AWS's responses there, as fixtures")
    parsed = parser.parse_args(arguments)
    try:
        name = parsed.deployment or read_config(parsed.config).name
        with _recording(parsed.record, name) as record:

            def notify(sentence: str) -> None:
                sys.stdout.write(f"ok: {sentence}\n")
                sys.stdout.flush()
                if record:
                    record.note(sentence)

            smoke(
                name,
                seconds=parsed.seconds,
                model=parsed.model,
                notify=notify,
                record=record,
            )
    except (ConfigRefused, SmokeFailed, ApiFailed, NotDeployed) as exc:
        sys.stderr.write(f"failed: {exc}\n")
        return 1
    except (AwsError, BotoCoreError, ClientError) as exc:
        sys.stderr.write(f"AWS refused: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
