"""The first errors of a batch, as the Lambda answers with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.handler.api.rig import answer_to, request_of
from tests.handler.aws.given import make_batch
from tests.handler.finalize.rig import Cloud as FinalizeCloud
from tests.handler.intake.rig import Cloud
from tidemill.batch.model import Batch
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.dashboard.failures import Failure, group_errors
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.sync import Aws
from tidemill.handler.dashboard.first_errors import first_errors

KEY = "output/x.errors.jsonl"


def failed(cloud: Cloud, custom_id: str) -> Batch:
    """Record a batch that has ended with one error, which is the newest of its key."""
    row = {"custom_id": custom_id, "response": None, "error": {"code": "x", "message": "y"}}
    drop = cloud.put(json.dumps(row).encode() + b"\n", KEY)
    file_id = f"file-{custom_id:0>32}"
    file = File(
        file_id, "default", KEY, 9, 1, "x.jsonl", "batch_output", version_id=drop.version_id
    )
    cloud.run(cloud.deployment.files.put_file(file))
    batch = make_batch(
        cloud.deployment, status=Status.COMPLETED, error_file_id=file_id, final=Progress(0, 1)
    )
    return cloud.run(cloud.deployment.table.create_batch(batch))


def errors_of(batch: Batch) -> str:
    """Return what the page shows of the errors of a batch."""
    event = request_of(f"/dashboard/view/batches/{batch.id}/errors")
    event["headers"].pop("accept-encoding")
    answer = answer_to(event)
    assert answer["statusCode"] == 200
    body: str = answer["body"]
    return body


def test_errors_are_those_of_the_batch_itself(cloud: Cloud) -> None:
    """A newer drop of the key has written over the object: each shows its own."""
    older, newer = failed(cloud, "1111"), failed(cloud, "2222")
    for batch, own, others in ((older, "1111", "2222"), (newer, "2222", "1111")):
        body = errors_of(batch)
        assert own in body
        assert others not in body


def test_errors_of_one_kind_are_shown_once() -> None:
    """They have a count and an example; another status or code is another kind."""
    failures = [
        Failure(
            f"row-{number}", "invalid_request", f"`top_k` must be -1 or more; got -{number}.", 400
        )
        for number in range(1, 31)
    ]
    failures.insert(5, Failure("odd", "server_error", "The engine failed.", 500))
    often, once = group_errors(failures)
    assert (often.count, often.first.place) == (30, "row-1")
    assert often.message == "`top_k` must be -1 or more; got -1, and similar ones"
    assert often.places.endswith("row-10 and 20 more")
    assert (once.count, once.message, once.places) == (1, "The engine failed.", "odd")
    same = [Failure("7", "x", "`url` is missing."), Failure("9", "x", "`url` is missing.")]
    assert [(kind.message, kind.places) for kind in group_errors(same)] == [
        ("`url` is missing.", "7, 9")
    ]


def test_a_batch_is_read_once_for_its_errors(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again whenever another row has failed."""
    batch = failed(cloud, "3333")
    calls: list[Call] = []
    send = Aws._send

    def watched(driver: Aws, call: Call) -> Any:
        calls.append(call)
        return send(driver, call)

    monkeypatch.setattr(Aws, "_send", watched)
    assert "3333" in errors_of(batch)
    keys = [call.arguments["Key"] for call in calls if call.method == "get_item"]
    assert sum(key["pk"] == {"S": f"BATCH#{batch.id}"} for key in keys) == 1


def test_errors_of_a_sealed_shard_are_those_of_its_commit(ministack: Emulator) -> None:
    """A worker that has lost its lease may have written others while the batch runs."""
    cloud = FinalizeCloud.on(ministack)
    drop = cloud.drop(4).begin()
    older = drop.claim(0)
    drop.run_shard(0)
    late = FinishedRow(1, b'{"custom_id":"late"}\n', is_success=False)
    cloud.run(cloud.deployment.bucket.put_part(older, 5, encode_part([late])))
    found = cloud.run(first_errors(cloud.deployment, drop.batch))
    assert [failure.place for failure in found or ()] == ["c4"]
