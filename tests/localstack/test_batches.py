"""Files dropped into a bucket, through the real handlers, a real worker and the demo model."""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from openai.types import Batch as OpenAIBatch
from PIL import Image

from localstack.cloud import Cloud
from localstack.resources import create_resources
from tests.emulators import Emulator, active_ids, count_messages, deployment_of
from tests.engine.vision_models import build, save_with_vocabulary
from tests.long_parameters import with_long
from tidemill import demo
from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.lifecycle.cancel import NotCancellable, cancel

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "tests/engine_process/scripted_engine.py"
SCRIPTED, VISION = "scripted", "vision"
ROWS_PER_SECOND = 80
QUICK = {
    "TIDEMILL_SHARD_LINES": "40",
    "TIDEMILL_LEASE_SECONDS": "6",
    "TIDEMILL_FLUSH_SECONDS": "0.5",
    "TIDEMILL_WAIT_SECONDS": "1",
    "TIDEMILL_MAX_INFLIGHT": "16",
}


@pytest.fixture(scope="module")
def cloud(ministack: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A pump, a worker of the demo model and one of a scripted engine, 80 rows a second."""
    resources = create_resources(
        ministack.endpoint_url, prefix="batches", models=[demo.NAME, SCRIPTED, VISION]
    )
    engine = [sys.executable, str(ENGINE), "--slots", "8"]
    engine += ["--service-seconds", str(8 / ROWS_PER_SECOND)]
    folder = tmp_path_factory.mktemp("batches")
    with Cloud(resources, ministack.environment | QUICK, folder) as found:
        found.start_lambdas("--reaper-seconds", "1")
        found.start_worker(name="demo")
        found.start_worker(
            "--served-model-name",
            SCRIPTED,
            name="scripted",
            TIDEMILL_ENGINE_COMMAND=json.dumps(engine),
        )
        yield found


@pytest.fixture
def aws(ministack: Emulator) -> Aws:
    """The driver with which tests run operations."""
    return Aws(ministack.client)


@pytest.fixture
def deployment(cloud: Cloud) -> Deployment:
    """The deployment that the cloud runs."""
    return deployment_of(cloud.resources)


def lines(count: int, model: str = SCRIPTED, **body: Any) -> bytes:
    """Return a file of that many requests."""
    requests = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": "Hi"}], **body},
        }
        for number in range(1, count + 1)
    ]
    return "\n".join(map(json.dumps, requests)).encode()


def num_rows_of(aws: Aws, deployment: Deployment, batch: Batch) -> int:
    """Return how many lines of a batch have a row."""
    return aws.run(deployment.table.get_shard_progress(batch)).progress(time.time()).num_rows


def wait_until(aws: Aws, deployment: Deployment, key: str, holds: Callable[[Batch], bool]) -> Batch:
    """Return the batch of a dropped key as soon as something holds for it."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for batch_id in aws.run(active_ids(deployment.table)):
            batch = aws.run(deployment.table.get_batch(batch_id))
            if batch is not None and batch.source.key == f"input/{key}.jsonl" and holds(batch):
                return batch
        time.sleep(0.02)
    raise AssertionError(f"{key} never came that far")


def test_the_example_file_is_answered_by_the_demo_model(cloud: Cloud) -> None:
    """A dropped file gets what `tidemill run` gives: rows in order, and a report besides."""
    body = (ROOT / "examples/demo.jsonl").read_bytes()
    cloud.drop("demo", body, team="search")
    report = cloud.wait("demo")
    requested = [json.loads(line)["custom_id"] for line in body.splitlines()]
    rows = cloud.rows("demo")
    failed = cloud.rows("demo", ".errors")
    assert report["status"] == "completed"
    assert report["metadata"] == {"team": "search"}
    answered = {row["custom_id"] for row in rows} | {row["custom_id"] for row in failed}
    assert answered == set(requested)
    assert [row["custom_id"] for row in rows] == [
        n for n in requested if n not in {row["custom_id"] for row in failed}
    ]
    assert all(row["response"]["body"]["choices"] for row in rows)
    assert report["usage"]["output_tokens"] > 0
    assert report["tidemill"]["engine_version"]
    OpenAIBatch.model_validate(report)


@pytest.mark.parametrize("share", with_long([0.5], [0.0, 0.99]))
def test_a_cancelled_batch_keeps_its_finished_rows(
    share: float, cloud: Cloud, aws: Aws, deployment: Deployment
) -> None:
    """Cancel at the beginning, in the middle and near the end: `cancelled`, and rows so far."""
    count, name = 240, f"cancel-{share}"
    slow = lines(2, wait=5).replace(b"line-", b"line-24")  # so that the end can be met
    cloud.drop(name, lines(count - 2) + b"\n" + slow)

    def has_come_far(batch: Batch) -> bool:
        done = num_rows_of(aws, deployment, batch)
        return batch.status is Status.IN_PROGRESS and done >= share * count

    batch = wait_until(aws, deployment, name, has_come_far)
    before = num_rows_of(aws, deployment, batch)
    aws.run(cancel(deployment, batch.id, int(time.time())))
    report = cloud.wait(name)
    rows = cloud.rows(name)
    numbers = [int(row["custom_id"].removeprefix("line-")) for row in rows]
    assert report["status"] == "cancelled"
    assert before <= len(rows) < count
    assert numbers == sorted(set(numbers))
    assert report["request_counts"] == {"total": count, "completed": len(rows), "failed": 0}
    # A promise to users, not a measurement; it takes about one second.
    assert report["cancelled_at"] - report["cancelling_at"] <= 10


def test_a_batch_that_finalizes_can_no_longer_be_cancelled(
    cloud: Cloud, aws: Aws, deployment: Deployment
) -> None:
    """The report is written while the batch finalizes, just before it has ended."""
    cloud.drop("late", lines(40))
    report = cloud.wait("late")
    with pytest.raises(NotCancellable, match=r"has ended|is finalizing"):
        aws.run(cancel(deployment, report["id"], int(time.time())))
    assert len(cloud.rows("late")) == 40


def test_an_expired_batch_has_a_row_for_every_line(
    cloud: Cloud, aws: Aws, deployment: Deployment
) -> None:
    """Finished lines are in the output; the others' rows have the code `batch_expired`."""
    count = 240
    cloud.drop("expire", lines(count))
    batch = wait_until(
        aws,
        deployment,
        "expire",
        lambda batch: num_rows_of(aws, deployment, batch) > 20,
    )
    soon = int(time.time())
    aws.run(deployment.table.change_batch(batch.id, Status.IN_PROGRESS, expires_at=soon))
    report = cloud.wait("expire")
    rows, unrun = cloud.rows("expire"), cloud.rows("expire", ".errors")
    assert report["status"] == "expired"
    assert report["expired_at"] - soon <= 10
    assert len(rows) >= 20
    assert {row["error"]["code"] for row in unrun} == {"batch_expired"}
    names = sorted(
        (row["custom_id"] for row in rows + unrun), key=lambda name: int(name.partition("-")[2])
    )
    assert names == [f"line-{number}" for number in range(1, count + 1)]
    assert report["request_counts"] == {"total": count, "completed": len(rows), "failed": 0}


def test_a_newer_upload_of_a_key_replaces_the_older_batch(
    cloud: Cloud, aws: Aws, deployment: Deployment
) -> None:
    """The older batch is cancelled, and the key finally has the newer output."""
    cloud.drop("twice", lines(400))
    older = wait_until(aws, deployment, "twice", lambda batch: batch.num_shards > 0)
    cloud.drop("twice", lines(5))
    deadline = time.monotonic() + 600
    while len(cloud.rows("twice")) != 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    report = cloud.wait("twice")
    assert report["id"] != older.id
    assert report["status"] == "completed"
    assert len(cloud.rows("twice")) == 5
    ended = aws.run(deployment.table.get_batch(older.id))
    assert ended is not None
    assert ended.status is Status.CANCELLED


def test_a_request_that_kills_the_engine_does_not_take_the_others_with_it(cloud: Cloud) -> None:
    """It gets an error row, found by running suspects apart; the rest of the file is answered."""
    body = lines(20).replace(b'"custom_id": "line-7"', b'"custom_id": "poison"')
    poisoned = [
        line.replace(b'"body": {', b'"body": {"die": true, ') if b"poison" in line else line
        for line in body.splitlines()
    ]
    cloud.drop("poison", b"\n".join(poisoned))
    report = cloud.wait("poison")
    [failed] = cloud.rows("poison", ".errors")
    assert failed["custom_id"] == "poison"
    assert failed["response"]["body"]["error"]["code"] == "engine_killed"
    assert report["request_counts"] == {"total": 20, "completed": 19, "failed": 1}


@pytest.mark.long  # a worker of a vision model starts
def test_images_of_a_drop_are_read_from_the_tenants_folder(cloud: Cloud, tmp_path: Path) -> None:
    """A foreign key is refused before a worker starts, or has a row; a missing one has a row."""
    save_with_vocabulary(build("gemma3"), tmp_path)
    image = BytesIO()
    Image.new("RGB", (60, 60), "red").save(image, "PNG")
    bucket, keys = cloud.bucket, ["default/red.png", "other/red.png", "default/missing.png"]
    for key in keys[:2]:
        cloud.s3.put_object(Bucket=bucket, Key=f"media/{key}", Body=image.getvalue())
    requests = []
    for key in keys:
        part = {"type": "image_url", "image_url": {"url": f"s3://{bucket}/media/{key}"}}
        fields = {"max_tokens": 4, "messages": [{"role": "user", "content": [part]}]}
        requests.append(lines(1, VISION, **fields).replace(b"line-1", key.encode()))
    cloud.drop("images", b"\n".join(requests))
    [error] = cloud.wait("images")["errors"]["data"]
    foreign = "`messages.0.content.0` has another prefix: a batch may only read "
    foreign += f"s3://{bucket}/media/default/ here."
    assert (error["line"], error["message"]) == (2, foreign)
    cloud.start_worker("--model", str(tmp_path), "--served-model-name", VISION, name=VISION)
    cloud.drop("images-skip", b"\n".join(requests), on_invalid_line="skip")
    report = cloud.wait("images-skip")
    assert report["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    [row] = cloud.rows("images-skip")
    assert row["custom_id"] == keys[0]
    assert row["response"]["body"]["usage"]["prompt_tokens"] > 16  # the tokens of an image
    failed = cloud.rows("images-skip", ".errors")
    errors = {row["custom_id"]: row["response"]["body"]["error"] for row in failed}
    assert errors[keys[1]]["message"] == foreign
    assert "the object does not exist" in errors[keys[2]]["message"]


def bad_line(text: str) -> bytes:
    """Return a file whose second line is not good."""
    return lines(1) + b"\n" + text.encode()


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty_file"),
    "blank": (b"\n\n \n", "empty_file"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"\x00" * 40, "invalid_json_line"),
    "utf16": (lines(1).decode().encode("utf-16"), "invalid_json_line"),
    "csv": (b"custom_id,prompt\na,hello\n", "invalid_json_line"),
    "no-custom-id": (bad_line('{"url": "/v1/completions", "body": {}}'), "missing_required"),
    "method": (lines(1).replace(b'"POST"', b'"GET"'), "invalid_method"),
    "url": (lines(1).replace(b"/v1/chat/completions", b"/v1/nothing"), "invalid_url"),
    "duplicate": (lines(1) + b"\n" + lines(1), "duplicate_custom_id"),
    "unknown-model": (lines(1, "gpt-9"), "model_not_found"),
    "two-models": (lines(1) + b"\n" + lines(2, demo.NAME).splitlines()[1], "model_mismatch"),
    "stream": (lines(1, stream=True), "stream_not_supported"),
    "bad \u00fc+&=?#% ../name": (b"not json", "invalid_json_line"),
    "x" * 990: (b"not json", "invalid_json_line"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_fails_with_its_reason(name: str, cloud: Cloud) -> None:
    """The batch's errors say what is wrong and where; nothing of the file is run."""
    body, code = BAD_FILES[name]
    cloud.drop(name, body)
    report = cloud.wait(name)
    assert report["status"] == "failed"
    [first, *_] = report["errors"]["data"]
    assert first["code"].startswith(code)
    assert first["message"]
    assert cloud.read(f"output/{name}.jsonl") is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"completion_window": "soon"}, "completion-window"),
        ({"completion_window": "90d"}, "completion-window"),
        ({"output_url": "http://example.com/x"}, "output-url"),
        ({"output_url": "https://user:secret@example.com/x"}, "output-url"),
        ({"on_invalid_line": "maybe"}, "on-invalid-line"),
        ({f"key-{number}": "v" for number in range(17)}, "metadata"),
    ],
)
def test_a_bad_option_fails_the_batch(options: dict[str, str], param: str, cloud: Cloud) -> None:
    """A drop has no caller to reply to, so the report names the option."""
    name = f"option-{param}-{len(options)}-{options.get('completion_window', '')}{time.time()}"
    cloud.drop(name, lines(1), **options)
    report = cloud.wait(name)
    assert report["status"] == "failed"
    assert param in {error["param"] for error in report["errors"]["data"]}


def test_an_upload_is_not_named_like_an_error_file(cloud: Cloud) -> None:
    """Its output would be the object that another upload's errors go to."""
    cloud.drop("x.errors", lines(1))
    report = cloud.wait("x.errors")
    assert report["status"] == "failed"
    assert report["errors"]["data"][0]["param"] == "key"


def test_an_output_url_that_points_inside_is_not_spoken_to(cloud: Cloud) -> None:
    """Nothing is run for it, and the error says which url it is."""
    cloud.drop("inside", lines(2), output_url="https://169.254.169.254/latest/meta-data")
    report = cloud.wait("inside")
    assert report["status"] == "failed"
    [error] = report["errors"]["data"]
    assert (error["code"], error["param"]) == ("invalid_option", "output-url")


def test_bad_lines_may_be_skipped(cloud: Cloud) -> None:
    """With `on-invalid-line=skip` a bad line has an error row, and the others run."""
    cloud.drop("skip", lines(2) + b"\nnot json\n", on_invalid_line="skip")
    report = cloud.wait("skip")
    assert report["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    [row] = cloud.rows("skip", ".errors")
    assert row["error"]["code"] == "invalid_json_line"
    assert row["error"]["line"] == 3


def test_nonsense_on_the_queues_is_dropped(cloud: Cloud, ministack: Emulator) -> None:
    """Messages for nothing that exists leave the queues, and the next file is answered."""
    sqs = ministack.client("sqs")
    for body in ("", "[]", "{", '{"batch_id": "batch_none", "shard": 7}', '{"shard": -1}', "null"):
        for url in (cloud.resources.control, cloud.resources.work[SCRIPTED]):
            sqs.send_message(QueueUrl=url, MessageBody=body or " ")
    cloud.drop("after-nonsense", lines(3))
    assert cloud.wait("after-nonsense")["status"] == "completed"
    deadline = time.monotonic() + 120
    urls = [cloud.resources.control, cloud.resources.work[SCRIPTED]]
    while time.monotonic() < deadline and any(count_messages(sqs, url) for url in urls):
        time.sleep(0.1)
    assert [count_messages(sqs, url) for url in urls] == [0, 0]


def test_an_input_that_goes_while_it_runs_fails_the_batch(
    cloud: Cloud, aws: Aws, deployment: Deployment
) -> None:
    """All versions deleted: the batch fails with the reason and keeps what was finished."""
    cloud.drop("gone", lines(1_000))  # so that it still runs when the first rows are counted
    wait_until(
        aws,
        deployment,
        "gone",
        lambda batch: num_rows_of(aws, deployment, batch) > 0,
    )
    versions = cloud.s3.list_object_versions(
        Bucket=cloud.resources.bucket, Prefix="input/gone.jsonl"
    )["Versions"]
    for version in versions:
        cloud.s3.delete_object(
            Bucket=cloud.resources.bucket, Key=version["Key"], VersionId=version["VersionId"]
        )
    report = cloud.wait("gone")
    assert report["status"] == "failed"
    assert "input_changed" in {error["code"] for error in report["errors"]["data"]}
    assert 0 < len(cloud.rows("gone")) < 1_000


@pytest.mark.parametrize("form", with_long(["json.gz", "JSONL"], ["json", "jsonl.gz"]))
def test_a_file_in_another_form_gets_the_same_rows(form: str, cloud: Cloud) -> None:
    """The rows come through shards, a worker and finalize, in line order."""
    body = lines(100)
    data = json.dumps([json.loads(line) for line in body.splitlines()], indent=1).encode()
    data = data if "json" in form.split(".") else body
    cloud.put(f"form.{form}", gzip.compress(data) if form.endswith("gz") else data)
    report = cloud.wait(f"form.{form}")
    assert report["status"] == "completed"
    assert report["input_file_id"] == f"s3://{cloud.resources.bucket}/input/form.{form}"
    requested = [f"line-{number}" for number in range(1, 101)]
    assert [row["custom_id"] for row in cloud.rows(f"form.{form}")] == requested


def test_a_file_without_requests_is_reported(cloud: Cloud) -> None:
    """The report is in the place of its results."""
    cloud.put("data.csv", b"custom_id,prompt\n1,hello\n")
    report = cloud.wait("data.csv")
    assert report["status"] == "failed"
    [error] = report["errors"]["data"]
    assert error["message"].startswith("This looks like CSV: define a request for each row")


def test_a_folder_and_a_foreign_key_make_no_batch(cloud: Cloud) -> None:
    """Folder markers, and keys outside `input/`, leave nothing."""
    body = lines(1)
    cloud.s3.put_object(Bucket=cloud.resources.bucket, Key="other/x.jsonl", Body=body)
    cloud.s3.put_object(Bucket=cloud.resources.bucket, Key="input/x/", Body=b"")
    cloud.drop("marker", body)
    assert cloud.wait("marker")["status"] == "completed"
    for key in ("output/x/.batch.json", "output/other/x.batch.json"):
        with pytest.raises(ClientError):
            cloud.s3.head_object(Bucket=cloud.resources.bucket, Key=key)
