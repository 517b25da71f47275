"""A file that many runs read: units of work, in any order, again and again, killed at any call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.emulators import MODEL, Emulator
from tests.handler.intake.rig import Cloud, line_of, lines_of, plenty
from tests.handler.killing import Killed
from tidemill.batch.file.expected_tokens import NO_TOKENS
from tidemill.batch.file.formats import FileFormat
from tidemill.batch.intake_progress import WorkUnit, new_progress
from tidemill.batch.model import Batch, Shard
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import intake_message
from tidemill.handler.errors import AwsError
from tidemill.handler.intake import phases
from tidemill.handler.intake.control_messages import IntakeStep
from tidemill.handler.intake.work_units import _UnitRun, run_unit
from tidemill.handler.lifecycle.cancel import cancel


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a separate deployment, with short ranges, on each emulator in turn."""
    return Cloud.on(emulator, shard_lines="4", range_bytes="1000")


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return such a deployment on one emulator, for what is not about AWS."""
    return Cloud.on(ministack, shard_lines="4", range_bytes="1000")


def receive_steps(cloud: Cloud) -> list[IntakeStep]:
    """Take the messages off the intake queue."""
    return [
        IntakeStep(message["batch_id"], message["unit"])
        for message in cloud.messages(cloud.deployment.intake)
    ]


def read_whole(cloud: Cloud, batch: Batch, mix: Callable[[list[IntakeStep]], Any]) -> Batch:
    """Handle every message until there is none; `mix` may repeat them and their order."""
    waiting = [IntakeStep(batch.id)]
    for _ in range(50):
        mix(waiting)
        for step in waiting:
            run_unit(cloud.aws, cloud.deployment, step, plenty, chunk_bytes=300)
        waiting = receive_steps(cloud)
        if not waiting:
            return cloud.batch(batch.id)
    raise AssertionError("messages without end")


def rows_in(shards: list[Shard]) -> list[tuple[int, int, int, int, int]]:
    """Return what was planned, whatever the batch is called."""
    return [(one.number, one.first_line, one.num_rows, one.start, one.end) for one in shards]


def test_a_long_file_is_taken_in_by_many_runs(cloud: Cloud) -> None:
    """Shards cover it without a gap, and are rung for once each."""
    data = lines_of(40) + b"\n" + line_of("last", url="/v1/completions")
    batch = read_whole(cloud, cloud.create(data), lambda _: None)
    assert batch.status is Status.IN_PROGRESS
    assert (batch.num_rows, batch.endpoint) == (41, "/v1/chat/completions")
    assert batch.num_shards == batch.shards_left == batch.shards_rung
    shards = cloud.shards(batch.id)
    assert [shard.start for shard in shards] == [
        0,
        *(shard.end for shard in shards[:-2]),
        len(data) - len(line_of("last", url="/v1/completions")),
    ][: len(shards)]
    assert sum(shard.num_rows for shard in shards) == 41
    assert sum((shard.expected for shard in shards), start=NO_TOKENS) == batch.expected
    assert batch.expected.input > 40 * len(line_of(1)) // 5
    assert shards[-1].end == len(data)
    assert cloud.rung_shards() == list(range(batch.num_shards))


def test_a_bad_long_file_fails_with_every_bad_line_named(cloud: Cloud) -> None:
    """The numbers are those of the file, and no shard is recorded."""
    data = lines_of(30) + b"{\n" + line_of(3) + b"\n" + line_of("z", body={"model": "no"})
    batch = read_whole(cloud, cloud.create(data), lambda _: None)
    assert batch.status is Status.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [
        ("invalid_json_line", 31),
        ("duplicate_custom_id", 32),
        ("model_not_found", 33),
    ]
    assert batch.errors[1].message == "`custom_id` is already used in line 4"
    assert cloud.shards(batch.id) == []


def test_a_range_that_began_with_another_model_is_scanned_again(ministack: Emulator) -> None:
    """The model of the file's first line decides which lines are invalid, not the range's first."""
    cloud = Cloud.on(ministack, "a", "b", shard_lines="4", range_bytes="1000")
    other = [line_of(f"b{n}", body={"model": "b"}) + b"\n" for n in range(12)]
    good = [line_of(f"a{n}", body={"model": "a"}) + b"\n" for n in range(12)]
    batch = read_whole(cloud, cloud.create(b"".join([*good, *other])), lambda _: None)
    assert [error.line for error in batch.errors] == list(range(13, 25))
    words = "the model is 'b', but earlier lines use 'a': make one file per model"
    assert {error.message for error in batch.errors} == {words}


@pytest.mark.parametrize("range_bytes", [3000, 100_000], ids=["ranges", "one range"])
def test_a_range_of_very_many_lines_is_scanned_in_parts(mini: Cloud, range_bytes: int) -> None:
    """A run is limited even for very short lines; the first line's model applies to all."""
    good, other = lines_of(30), line_of("b", body={"model": "other"}) + b"\n"
    short = mini.having(
        range_bytes=range_bytes, model_aliases={}, work_queues={MODEL: "q", "other": "q"}
    )
    batch = mini.create(b"\n" * 40 + good + b"\n" * 40 + other)
    reading = new_progress(
        FileFormat(),
        short.deployment.settings.shard_limits,
        batch.source.num_bytes,
        range_bytes,
        None,
    )
    begun = replace(reading, max_lines=9)
    mini.run(mini.deployment.intake_progress.get_or_create(batch.id, begun))
    batch = read_whole(short, batch, lambda _: None)
    [error] = batch.errors
    assert (error.code, error.line) == ("model_mismatch", 111)
    assert f"use '{MODEL}'" in error.message


@pytest.mark.parametrize("seed", range(3))
def test_messages_in_any_order_and_twice_change_nothing(mini: Cloud, seed: int) -> None:
    """They are doorbells: what is done is found done."""
    data, dice = lines_of(60), random.Random(seed)
    expected = read_whole(mini, mini.create(data, "input/a.jsonl"), lambda _: None)

    def mix(waiting: list[IntakeStep]) -> None:
        waiting += dice.choices(waiting, k=3)
        dice.shuffle(waiting)

    # A copy that meets its twin's turn waits for its end: it is not heard of in this test.
    batch = read_whole(mini, mini.create(data, "input/b.jsonl"), mix)
    assert batch.status is Status.IN_PROGRESS
    assert rows_in(mini.shards(batch.id)) == rows_in(mini.shards(expected.id))


class Dying:
    """Ends its process before some of its requests."""

    def __init__(self, client: Any, dice: random.Random) -> None:
        self._client = client
        self._dice = dice

    def __getattr__(self, name: str) -> Any:
        if self._dice.random() < 0.1:
            raise Killed
        return getattr(self._client, name)


@pytest.mark.parametrize("seed", range(3))
def test_runs_may_die_at_any_moment(mini: Cloud, seed: int) -> None:
    """Messages of dead runs come again, and the file is taken in as if none had died."""
    data, dice = lines_of(30), random.Random(seed)
    expected = read_whole(mini, mini.create(data, "input/a.jsonl"), lambda _: None)
    rung = mini.rung_shards()
    batch = mini.create(data, "input/b.jsonl")
    waiting, num_deaths = [IntakeStep(batch.id)], 0
    clients, table = mini.aws.clients, mini.deployment.table
    while waiting:
        step = waiting.pop(0)
        mini.aws.clients = {service: Dying(client, dice) for service, client in clients.items()}
        try:
            run_unit(mini.aws, mini.deployment, step, plenty)
        except Killed:
            num_deaths += 1
            waiting.append(step)
        finally:
            mini.aws.clients = clients
        # A message comes again long after the turn of the dead has lapsed.
        left = mini.batch(batch.id)
        mini.run(table.change_batch(left.id, left.status, turn_until=0))
        waiting += receive_steps(mini)
    batch = mini.batch(batch.id)
    assert num_deaths > 2
    assert batch.status is Status.IN_PROGRESS
    assert (batch.num_rows, batch.num_shards) == (30, expected.num_shards)
    assert rows_in(mini.shards(batch.id)) == rows_in(mini.shards(expected.id))
    assert set(mini.rung_shards()) == set(rung)


def test_a_unit_hears_of_a_cancel(mini: Cloud) -> None:
    """It stops within seconds, and nothing more is done for the batch."""
    batch = mini.create(lines_of(60))
    run_unit(mini.aws, mini.deployment, IntakeStep(batch.id), plenty)
    step = next(each for each in receive_steps(mini) if each.unit)
    clock, looks = time.time(), iter(range(100))

    def now() -> float:
        number = next(looks)
        if number == 2:
            mini.run(cancel(mini.deployment, batch.id, int(clock)))
        return clock + 10 * number

    run_unit(mini.aws, mini.deployment, step, plenty, now=now, chunk_bytes=100)
    reading = mini.run(mini.deployment.intake_progress.get_progress(batch.id))
    assert reading is not None
    assert step.unit in reading.left
    assert mini.batch(batch.id).status is Status.CANCELLED


def test_a_unit_whose_batch_is_erased_meanwhile_is_over(mini: Cloud) -> None:
    """Its message does not come again: there is nothing to note it in."""
    batch = mini.create(lines_of(60))
    run_unit(mini.aws, mini.deployment, IntakeStep(batch.id), plenty)
    step = next(each for each in receive_steps(mini) if each.unit)
    table, clock = mini.deployment.table, time.time()

    def erase() -> float:
        """Cancel the batch and erase its items while the unit reads, which looks no more."""
        if mini.batch(batch.id).status is Status.VALIDATING:
            mini.run(cancel(mini.deployment, batch.id, int(clock)))
            for key in mini.run(table.page_of_items(batch, 500)):
                mini.run(table.delete_item(key))
        return clock

    one = _UnitRun(mini.aws, mini.deployment, batch, erase, 100)
    assert not one.do(WorkUnit.named(step.unit))
    assert mini.run(table.page_of_items(batch, 500)) == []
    run_unit(mini.aws, mini.deployment, step, plenty)
    assert mini.batch(batch.id).status is Status.CANCELLED


def test_a_unit_that_comes_behind_the_window_lets_the_batch_expire(mini: Cloud) -> None:
    """It sends a message for the batch."""
    batch = mini.create(lines_of(60), metadata={"completion-window": "30m"})
    later = time.time() + 1801
    run_unit(mini.aws, mini.deployment, IntakeStep(batch.id, "scan-0"), plenty, now=lambda: later)
    assert [message["kind"] for message in mini.messages()] == ["advance"]


def test_an_input_that_goes_in_the_middle_fails_the_batch(cloud: Cloud) -> None:
    """Any run that finds it missing may fail the batch."""
    batch = cloud.create(lines_of(60))
    run_unit(cloud.aws, cloud.deployment, IntakeStep(batch.id), plenty)
    cloud.aws.clients["s3"].delete_object(
        Bucket=cloud.bucket, Key=batch.source.key, VersionId=batch.source.version_id
    )
    for step in receive_steps(cloud):
        run_unit(cloud.aws, cloud.deployment, step, plenty)
    batch = cloud.batch(batch.id)
    assert batch.status is Status.FAILED
    assert [error.code for error in batch.errors] == ["input_gone"]


def test_a_units_lost_results_do_not_fail_the_file(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails, so that the message comes again."""
    batch = mini.create(lines_of(12))
    get = type(mini.deployment.bucket).get

    def lose(bucket: Any, key: str) -> Any:
        return get(bucket, f"{key}.lost" if "/intake/" in key else key)

    monkeypatch.setattr(type(mini.deployment.bucket), "get", lose)
    with pytest.raises(AwsError):
        read_whole(mini, batch, lambda _: None)
    assert mini.batch(batch.id).status is Status.VALIDATING


def test_shards_are_recorded_by_several_runs_where_they_are_many(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes those of some ranges."""
    monkeypatch.setattr(phases, "SHARDS_PER_RECORD", 3)
    batch = read_whole(mini, mini.create(lines_of(60)), lambda _: None)
    assert sum(shard.num_rows for shard in mini.shards(batch.id)) == 60
    assert batch.num_shards > 9


def test_limits_of_a_deployment_hold_for_files_that_come_after_them(mini: Cloud) -> None:
    """A new version of it may cut and divide other files otherwise, not this one."""
    batch = mini.create(lines_of(60))
    run_unit(mini.aws, mini.deployment, IntakeStep(batch.id), plenty)
    newer = mini.having(shard_lines=50, range_bytes=3000)
    for step in receive_steps(mini):
        run_unit(mini.aws, newer.deployment, step, plenty)
    batch = read_whole(newer, batch, lambda _: None)
    assert max(shard.num_rows for shard in mini.shards(batch.id)) == 4


def test_shards_that_an_earlier_version_has_cut_are_cut_again(cloud: Cloud) -> None:
    """Each row is in one shard, as in a file that no other version has begun to read."""
    data, table = lines_of(40), cloud.deployment.table
    expected = read_whole(cloud, cloud.create(data, "input/a.jsonl"), lambda _: None)
    batch = cloud.create(data, "input/b.jsonl")
    for number in range(expected.num_shards + 3):
        start = 5 * number
        cloud.run(table.put_shard(Shard(batch.id, number, 1 + number, 1, start, start + 5)))
    batch = read_whole(cloud, batch, lambda _: None)
    assert rows_in(cloud.shards(batch.id)) == rows_in(cloud.shards(expected.id))


def test_a_repeated_unit_sends_the_lost_messages_of_the_next_phase(mini: Cloud) -> None:
    """The run that opened the phase died before it sent them."""
    batch = mini.create(lines_of(12))
    run_unit(mini.aws, mini.deployment, IntakeStep(batch.id), plenty)
    first = receive_steps(mini)
    assert intake_message(batch.id, "scan-0") == {
        "kind": "intake",
        "batch_id": batch.id,
        "unit": "scan-0",
    }
    table = mini.deployment.settings.table
    mini.aws.clients["dynamodb"].update_item(
        TableName=table,
        Key={"pk": {"S": f"BATCH#{batch.id}"}, "sk": {"S": "READING"}},
        UpdateExpression="SET is_rung = :no",
        ExpressionAttributeValues={":no": {"BOOL": False}},
    )
    run_unit(mini.aws, mini.deployment, first[0], plenty)
    assert receive_steps(mini) == []
    run_unit(mini.aws, mini.deployment, first[0], plenty)
    assert [each.unit for each in receive_steps(mini)] == [each.unit for each in first[1:]]
