"""A worker whose queue and table are AWS's and whose bucket is in another store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from tests.emulators import MODEL, Emulator
from tests.handler.worker.rig import ROOT, Rig, until
from tests.strict_store import StrictStore
from tidemill.demo import MODEL_PATH
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.sync import Aws

SERVICES = ("SQS", "DYNAMODB", "EVENTBRIDGE")


def move_to_store(rig: Rig, store: StrictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the bucket of a deployment into a store, by a profile; AWS has none any more."""
    aws, at_aws = rig.emulator, rig.emulator.endpoint_url
    aws.client("s3").delete_bucket(Bucket=rig.deployment.bucket.name)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name)
        del rig.environment[name]
    named = {f"AWS_ENDPOINT_URL_{service}": at_aws for service in SERVICES}
    named |= {"TIDEMILL_BUCKET": store.bucket, **store.write_profile(rig.folder)}
    rig.environment |= named
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    rig.deployment.bucket = Bucket(store.bucket)

    def make_client(service: str, config: Config | None = None) -> Any:
        return (store.emulator if service == "s3" else aws).client(service, config)

    rig.aws = Aws(make_client)


async def test_a_shard_is_run_through_the_store(
    ministack: Emulator,
    rig: Rig,
    store: StrictStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It uses the store's keys and region, and the rows are those that a bucket of AWS gets."""
    bodies: list[Any] = [{"text": "ä" * n, "status": 400 if n == 3 else 200} for n in range(20)]
    found = []
    for where in ("AWS", "store"):
        if where == "store":
            rig = Rig.on(ministack, tmp_path)
            move_to_store(rig, store, monkeypatch)
        work = rig.batch(*bodies, shard_lines=6)
        async with rig.worker() as running:
            await until(lambda work=work: work.is_done)
        assert running.status == 0
        rows = work.sealed() + work.sealed("errors")
        found.append([without_time(row) for row in rows])
    assert found[0] == found[1]
    assert len(found[0]) == 20
    assert store.refused == []


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without when its batch was made."""
    (row["response"].get("body") or {}).pop("created", None)
    return row


@pytest.mark.long
def test_a_run_and_a_worker_with_weights_of_the_store_give_equal_rows(
    rig: Rig, store: StrictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are processes with the real engine, the same model, and one file."""
    move_to_store(rig, store, monkeypatch)
    for path in MODEL_PATH.iterdir():
        store.put(f"m/{path.name}", path.read_bytes())
    data = (ROOT / "tests/demo/questions.jsonl").read_bytes()
    model = ("--model", f"s3://{store.bucket}/m", "--weights-cache", str(rig.folder / "weights"))
    work = rig.batch(*data.splitlines(keepends=True), shard_lines=10)
    process = rig.start("--exit-when-idle", 1, *model, engine=None)
    target = f"s3://{store.bucket}/rows.jsonl"
    command = [sys.executable, "-m", "tidemill", "run", store.put("in.jsonl", data), "-o", target]
    command += ["--served-model-name", MODEL, *model]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert process.wait() == 0, process.log
    rows = [json.loads(row) for row in store.get("rows.jsonl").splitlines()]
    assert [without_time(row) for row in rows] == [without_time(row) for row in work.sealed()]
    assert len(rows) == 27
    assert store.refused == []
