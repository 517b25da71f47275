"""New batches: of uploads, and of requests to the API."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.emulators import active_ids
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.batch_request import parse_request
from tidemill.batch.errors import InvalidOption, KeyReused
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import batch_id_of_drop
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.handler.aws.queues import advance_message
from tidemill.handler.errors import AwsError
from tidemill.handler.intake import new_batch
from tidemill.handler.intake.control_messages import Drop
from tidemill.handler.intake.new_batch import create_batch, create_batch_of_drop

NOW = int(time.time())


def take(cloud: Cloud, drop: Drop) -> Batch | None:
    """Return what an upload makes, if anything."""
    return cloud.run(create_batch_of_drop(cloud.deployment, drop, int(time.time())))


def request_batch(cloud: Cloud, now: int = NOW, tenant: str = "tenant", **changes: Any) -> Batch:
    """Return the batch of an API request for the file `file-1`."""
    fields = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "metadata": None}
    return cloud.run(create_batch(cloud.deployment, tenant, parse_request(fields | changes), now))


def test_fifty_batches_of_one_second_are_listed_newest_first(mini: Cloud) -> None:
    """The order of creation decides, also across pages: `created_at` is the same in all of them."""
    put_file(mini, "fifty")
    made = [request_batch(mini, tenant="fifty").id for _ in range(50)]
    pages: list[Batch] = []
    has_more = True
    while has_more:
        last = pages[-1] if pages else None
        listing = mini.deployment.table.list_batches("fifty", limit=20, after=last)
        page, has_more = mini.run(listing)
        pages += page
    assert [batch.id for batch in pages] == made[::-1]
    assert {batch.created_at for batch in pages} == {NOW}
    active = mini.run(mini.deployment.overview.list_active("fifty"))
    assert [batch.id for batch in active] == made


def test_folders_name_tenants_if_the_deployment_enables_it(mini: Cloud) -> None:
    """In the API, too, a tenant names its own uploads, and those of others are not found."""
    keys = ["input/x.jsonl", "input/search/x.jsonl", "input/search/deep/x.jsonl", "input/$/x.jsonl"]
    drops = [mini.put(lines_of(2), key) for key in keys]
    assert take(mini, mini.put(lines_of(2), "input/old/x.jsonl")).tenant == "default"  # type: ignore[union-attr]
    cloud = mini.having(drop_tenants=True)
    made = [take(cloud, drop) for drop in drops]
    assert [batch and batch.tenant for batch in made] == ["default", "search", "search", "default"]
    assert [bool(batch and batch.errors) for batch in made] == [False, False, False, True]
    assert made[3] is not None
    assert made[3].errors[0].message.startswith("The first folder under input/ must be a tenant")
    names = [f"s3://{mini.bucket}/{key}" for key in keys]
    assert request_batch(cloud, tenant="search", input_file_id=names[1]).tenant == "search"
    for tenant, name in (("search", names[0]), ("other", names[1]), ("default", names[1])):
        with pytest.raises(InvalidOption, match="does not name an existing file"):
            request_batch(cloud, tenant=tenant, input_file_id=name)


def put_file(cloud: Cloud, tenant: str = "tenant") -> Drop:
    """Upload a file as the API does and record it as `file-1`."""
    drop = cloud.put(lines_of(2), "files/file-1")
    cloud.run(
        cloud.deployment.files.put_file(
            File("file-1", tenant, drop.key, 10, 1, "lines.jsonl", "batch")
        )
    )
    return drop


def test_an_upload_makes_a_batch_of_the_pinned_object(cloud: Cloud) -> None:
    """Its options come from the metadata, its results go next to it, its window begins now."""
    data = lines_of(2)
    metadata = {"completion-window": "30m", "on-invalid-line": "skip", "max-cost": "1.5"}
    metadata["project"] = "p"
    drop = cloud.put(data, "input/a/ü b+c/../x.jsonl", metadata)
    batch = take(cloud, drop)
    assert batch is not None
    assert batch.id == batch_id_of_drop(cloud.bucket, drop.key, drop.sequencer)
    assert batch.status is Status.VALIDATING
    assert batch.source.key == drop.key
    assert batch.source.num_bytes == len(data)
    assert batch.source.version_id == drop.version_id
    assert batch.source.etag.startswith('"')
    assert batch.input_file_id == f"s3://{cloud.bucket}/{drop.key}"
    assert batch.outputs.output_key == "output/a/ü b+c/../x.jsonl"
    assert (batch.options.on_invalid_line, batch.options.max_cost) == ("skip", 1.5)
    assert batch.options.metadata == {"project": "p"}
    assert batch.expires_at - batch.created_at == 1800
    assert cloud.run(active_ids(cloud.deployment.table)) == [batch.id]


def test_an_upload_that_names_no_window_has_that_of_the_deployment(mini: Cloud) -> None:
    """An upload may set its own window; the API's requests always do."""
    cloud = mini.having(default_window="2d")
    assert cloud.create(lines_of(1)).options.completion_window == "2d"
    own = cloud.create(lines_of(1), metadata={"completion-window": "30m"})
    assert own.expires_at - own.created_at == 1800
    wrong = cloud.create(lines_of(1), metadata={"completion-window": "soon"})
    assert wrong.expires_at - wrong.created_at == 2 * 86_400
    put_file(cloud)
    assert request_batch(cloud).options.completion_window == "24h"


def test_a_batch_is_forgotten_long_after_its_window(mini: Cloud) -> None:
    """The deployment sets its lifetime, from whatever source it came; its shards live as long."""
    cloud = mini.having(keep_days=3)
    put_file(cloud)
    for batch in (cloud.create(lines_of(25)), request_batch(cloud)):
        assert batch.expires == batch.expires_at + 3 * 86_400
        cloud.ingest(batch)
        expected = 3 if batch.tenant == "default" else 1
        assert [shard.expires for shard in cloud.shards(batch.id)] == [batch.expires] * expected


def test_an_event_without_a_version_pins_the_one_that_is_there(cloud: Cloud) -> None:
    """A HEAD request to the bucket finds it."""
    drop = cloud.put(b"x")
    batch = take(cloud, replace(drop, version_id=None))
    assert batch is not None
    assert batch.source.version_id == drop.version_id


def test_a_bucket_without_versions_is_pinned_by_etag(cloud: Cloud) -> None:
    """There is no version to name."""
    s3 = cloud.aws.clients["s3"]
    s3.put_bucket_versioning(Bucket=cloud.bucket, VersioningConfiguration={"Status": "Suspended"})
    s3.put_object(Bucket=cloud.bucket, Key="input/x.jsonl", Body=lines_of(1))
    batch = take(cloud, Drop(cloud.bucket, "input/x.jsonl", "01"))
    assert batch is not None
    assert batch.source.version_id is None
    assert cloud.ingest(batch).status is Status.IN_PROGRESS


def test_an_event_that_comes_again_is_the_same_batch(cloud: Cloud) -> None:
    """It stays the same even if the object has been deleted since."""
    drop = cloud.put(lines_of(1))
    first = cloud.take(drop)
    assert take(cloud, drop) == first
    cloud.aws.clients["s3"].delete_object(
        Bucket=cloud.bucket, Key=drop.key, VersionId=drop.version_id
    )
    again = take(cloud, drop)
    assert again is not None
    assert again.id == first.id


def test_a_newer_upload_cancels_the_older_batch(cloud: Cloud) -> None:
    """One that has not begun is over at once; one that runs winds up first."""
    first = cloud.create(lines_of(1))
    second = cloud.create(lines_of(12))
    assert cloud.batch(first.id).status is Status.CANCELLED
    assert second.predecessor == first.id
    cloud.ingest(second)
    cloud.claim(second.id)
    third = cloud.create(lines_of(1))
    assert cloud.batch(second.id).status is Status.CANCELLING
    assert third.predecessor == second.id
    assert cloud.messages() == [advance_message(second.id)]


def test_an_older_event_that_comes_late_makes_nothing(cloud: Cloud) -> None:
    """The newer upload of the key is known."""
    older, newer = cloud.put(lines_of(1)), cloud.put(lines_of(2))
    batch = cloud.take(newer)
    assert take(cloud, older) is None
    assert cloud.run(active_ids(cloud.deployment.table)) == [batch.id]


def test_a_batch_that_has_ended_is_not_disturbed(cloud: Cloud) -> None:
    """A newer upload of its key waits for nothing: it has published nothing and never will."""
    first = cloud.ingest(cloud.create(b""))
    assert first.status is Status.FAILED
    second = cloud.create(lines_of(1))
    assert second.predecessor is None
    assert cloud.batch(first.id).status is Status.FAILED


def test_a_run_that_dies_before_it_cancels_is_done_again(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch is left over, even if a third upload has come in between."""
    first = cloud.create(lines_of(1))
    drop = cloud.put(lines_of(2))

    def die(*_: object) -> object:
        raise AwsError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(new_batch, "cancel", die)
        with pytest.raises(AwsError):
            take(cloud, drop)
    third = cloud.create(lines_of(3))
    second_id = batch_id_of_drop(cloud.bucket, drop.key, drop.sequencer)
    assert third.predecessor == second_id
    assert cloud.batch(second_id).status is Status.CANCELLED
    assert cloud.batch(first.id).status is Status.CANCELLED
    second = take(cloud, drop)
    assert second is not None
    assert cloud.batch(first.id).status is Status.CANCELLED
    assert cloud.run(active_ids(cloud.deployment.table)) == [third.id]


def test_a_short_drop_is_created_with_the_lock_of_its_run(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost reply to its creation does not matter, but a repeated event does not take the lock."""
    drop, now = cloud.put(lines_of(2)), int(time.time())

    def create(drop: Drop, owner: str) -> Batch | None:
        return cloud.run(create_batch_of_drop(cloud.deployment, drop, now, owner))

    transact = cloud.aws.clients["dynamodb"].transact_write_items

    def transact_twice(**arguments: Any) -> Any:
        transact(**arguments)
        return transact(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cloud.aws.clients["dynamodb"], "transact_write_items", transact_twice)
        made = create(drop, "a")
    assert made is not None
    assert (made.turn, made.turn_until) == ("a", now + 20)
    assert made == create(drop, "b") == cloud.batch(made.id)
    monkeypatch.setattr(new_batch, "SHORT_BYTES", 10)
    long = create(cloud.put(lines_of(2), "input/long.jsonl"), "a")
    assert long is not None
    assert long.turn is None


@pytest.mark.parametrize(
    "key",
    ["input/x.txt", "output/x.jsonl", "input/.jsonl", "x", "input/" + "k" * 1012 + ".jsonl"],
)
def test_other_objects_are_left_alone(mini: Cloud, key: str) -> None:
    """They are other keys, and those that leave no room for the names of their results."""
    assert take(mini, Drop(mini.bucket, key, "01")) is None
    assert take(mini, Drop("elsewhere", "input/x.jsonl", "01")) is None
    assert mini.run(active_ids(mini.deployment.table)) == []


def test_an_object_that_was_deleted_at_once_makes_nothing(cloud: Cloud) -> None:
    """There is nothing to run and no client to notify."""
    drop = cloud.put(lines_of(1))
    cloud.aws.clients["s3"].delete_object(
        Bucket=cloud.bucket, Key=drop.key, VersionId=drop.version_id
    )
    assert take(cloud, drop) is None
    assert take(cloud, replace(drop, key="input/never.jsonl", version_id=None)) is None
    assert cloud.run(active_ids(cloud.deployment.table)) == []


def test_invalid_options_make_a_batch_with_the_error(cloud: Cloud) -> None:
    """It has the defaults and the error with which it is going to fail."""
    batch = cloud.create(b"", metadata={"output-url": "http://example.com/secret"})
    [error] = batch.errors
    assert (error.code, error.param) == ("invalid_option", "output-url")
    assert batch.num_errors == 1
    assert batch.options.output_url is None


def test_a_request_makes_a_batch_of_a_file(cloud: Cloud) -> None:
    """Its results go where no upload can, and a message is on its way."""
    drop = put_file(cloud)
    batch = request_batch(cloud, endpoint="/chat/completions", completion_window="2h")
    assert batch.source.key == drop.key
    assert batch.source.version_id == drop.version_id
    assert (batch.tenant, batch.input_file_id) == ("tenant", "file-1")
    assert batch.endpoint == "/v1/chat/completions"
    assert batch.outputs.output_key == f"files/tenant/{batch.id}.jsonl"
    assert batch.expires_at == NOW + 7200
    assert cloud.messages() == [advance_message(batch.id)]


def test_a_request_may_name_an_object(cloud: Cloud) -> None:
    """The object must be an upload of the tenant in the deployment's bucket."""
    cloud.put(lines_of(1), "input/a b.jsonl")
    name = f"s3://{cloud.bucket}/input/a b.jsonl"
    batch = request_batch(cloud, tenant="default", input_file_id=name)
    assert batch.source.key == "input/a b.jsonl"
    with pytest.raises(InvalidOption, match="does not name an existing file"):
        request_batch(cloud, tenant="other tenant", input_file_id=name)


def test_a_request_that_is_repeated_makes_one_batch(cloud: Cloud) -> None:
    """Its idempotency key identifies it; without one each request creates a batch."""
    put_file(cloud, tenant="default")
    cloud.put(lines_of(1))
    first = request_batch(cloud, tenant="default", idempotency_key="k")
    later = request_batch(cloud, now=NOW + 100, tenant="default", idempotency_key="k")
    assert later.id == first.id
    assert len({request_batch(cloud, tenant="default").id for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"input_file_id": "s3://{bucket}/input/x.jsonl"},
        {"endpoint": "/v1/completions"},
        {"completion_window": "2h"},
        {"metadata": {"a": "b"}},
        {"on_invalid_line": "skip"},
        {"output_url": "https://example.com/"},
        {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_key_makes_one_batch_and_no_other(cloud: Cloud, changes: dict[str, Any]) -> None:
    """The same key with another request is refused, before and after the table lookup."""
    put_file(cloud, tenant="default")
    cloud.put(lines_of(1))
    first = request_batch(cloud, tenant="default", idempotency_key="k")
    name, value = next(iter(changes.items()))
    value = value.format(bucket=cloud.bucket) if isinstance(value, str) else value
    with pytest.raises(KeyReused) as caught:
        request_batch(cloud, tenant="default", idempotency_key="k", **{name: value})
    assert caught.value.param == "idempotency_key"
    assert cloud.run(active_ids(cloud.deployment.table)) == [first.id]


def test_a_request_is_repeated_though_its_file_has_gone(cloud: Cloud) -> None:
    """The batch exists: a client that lost the reply finds it."""
    drop = put_file(cloud)
    first = request_batch(cloud, idempotency_key="k")
    cloud.run(cloud.deployment.bucket.delete(drop.key))
    assert request_batch(cloud, idempotency_key="k") == cloud.batch(first.id)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": ["/v1/chat/completions"]}, "endpoint"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"input_file_id": "file-unknown"}, "input_file_id"),
        ({"input_file_id": "s3://elsewhere/input/x.jsonl"}, "input_file_id"),
        ({"input_file_id": "s3://"}, "input_file_id"),
        ({"input_file_id": "file-" + "x" * 3000}, "input_file_id"),
        ({"input_file_id": "file-\ud800"}, "input_file_id"),
        ({"completion_window": "1s"}, "completion_window"),
        ({"metadata": [1]}, "metadata"),
        ({"on_invalid_line": "maybe"}, "on_invalid_line"),
        ({"output_url": "https://u:p@example.com/"}, "output_url"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k" * 256}, "idempotency_key"),
        ({"idempotency_key": 1}, "idempotency_key"),
    ],
)
def test_a_wrong_parameter_is_named(mini: Cloud, changes: dict[str, Any], param: str) -> None:
    """No batch is made of it."""
    put_file(mini)
    with pytest.raises(InvalidOption) as caught:
        request_batch(mini, **changes)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message
    assert mini.run(active_ids(mini.deployment.table)) == []


@pytest.mark.parametrize("key", ["files/file-1", "work/x", "output/x.jsonl", "input/none.jsonl"])
def test_a_request_cannot_name_other_objects(mini: Cloud, key: str) -> None:
    """Another tenant's files, work in flight and missing objects are all refused."""
    put_file(mini, tenant="other tenant")
    for name in (f"s3://{mini.bucket}/{key}", "file-1"):
        with pytest.raises(InvalidOption, match="input_file_id"):
            request_batch(mini, input_file_id=name)


@pytest.mark.parametrize("name", ["x" * 1019, "\x00"])
def test_keys_that_s3_would_refuse_are_not_requested(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """S3's own error for such names would look like a server error."""
    monkeypatch.setattr(mini.aws.clients["s3"], "head_object", pytest.fail)
    with pytest.raises(InvalidOption, match="does not name an existing object"):
        request_batch(mini, tenant="default", input_file_id=f"s3://{mini.bucket}/input/{name}")


def test_a_refused_upload_does_not_hide_the_batch_before_it(cloud: Cloud) -> None:
    """The third upload of a key waits for the first, which still runs, not for the refused one."""
    first = cloud.ingest(cloud.create(lines_of(12)))
    cloud.claim(first.id)
    refused = cloud.ingest(cloud.create(b""))
    assert refused.status is Status.FAILED
    assert cloud.batch(first.id).status is Status.CANCELLING
    assert cloud.create(lines_of(1)).predecessor == first.id
