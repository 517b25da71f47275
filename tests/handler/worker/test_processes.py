"""Workers as separate processes, with an engine as a third: signals and deaths."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from tests.emulators import MODEL
from tests.handler.worker.rig import NEVER, Process, Rig, wait_for
from tests.long_parameters import with_long
from tests.warm_start import COLD_VARIABLE
from tidemill.batch.model import ShardStatus
from tidemill.batch.states import Status

GOOD: dict[str, Any] = {}
SLOW = {"wait": 0.15}


def names(*numbers: int) -> list[str]:
    """Return the custom ids of lines with these numbers."""
    return [f"c{number}" for number in numbers]


def has_begun(process: Process, count: int = 1) -> bool:
    """Return whether the engine has begun that many requests."""
    return len(process.requests()) >= count


def test_a_batch_is_run_to_its_commit(rig: Rig) -> None:
    """Every line gets its row, in order, and the batch is rung for when no shard is left."""
    work = rig.batch(*[{"status": 400 if n % 5 == 1 else 200} for n in range(50)], shard_lines=20)
    process = rig.start("--exit-when-idle", 1)
    wait_for(lambda: work.is_done, lambda: process.log)
    assert process.wait() == 0
    failed = [n for n in range(1, 51) if n % 5 == 2]
    assert work.ids("errors") == names(*failed)
    assert work.ids() == names(*(n for n in range(1, 51) if n not in failed))
    rung = rig.messages()
    assert rung
    assert all(message == {"kind": "advance", "batch_id": work.id} for message in rung)
    assert rig.messages(rig.queue) == []


def test_what_happens_is_logged_with_its_shard(rig: Rig) -> None:
    """Each event is one JSON object, with facts from outside: nothing of the requests."""
    work = rig.batch(GOOD, {"text": "secret"}, GOOD)
    process = rig.start("--exit-when-idle", 1)
    assert process.wait() == 0
    labels = {"batch_id": work.id, "shard": 0, "fence": 1}
    [claimed] = process.events("claimed")
    assert claimed.items() >= (labels | {"kept_lines": 0, "kept": "", "suspects": []}).items()
    [part] = process.events("part written")
    [key] = work.keys("part")
    assert part.items() >= (labels | {"key": key, "num_rows": 3, "lines": "1-3"}).items()
    [committed] = process.events("committed")
    assert committed.items() >= (labels | {"completed": 3, "failed": 0}).items()
    assert "secret" not in process.log


@pytest.mark.long  # test_sharing.py does it with workers in one process
def test_two_workers_share_a_batch(rig: Rig) -> None:
    """Each shard is run by one of them, and no line twice."""
    work = rig.batch(*[{"wait": 0.3}] * 60, shard_lines=5, rings=False)
    flags = ("--max-inflight", 2, "--lease-seconds", 60)
    both = [rig.start(*flags), rig.start(*flags)]
    wait_for(lambda: all(process.events("engine ready") for process in both))
    work.ring()
    wait_for(lambda: work.is_done, lambda: "\n".join(process.log for process in both))
    requests = [process.requests() for process in both]
    assert all(requests)
    assert sorted(requests[0] + requests[1]) == sorted(names(*range(1, 61)))
    assert [work.shard(n).fence for n in range(12)] == [1] * 12
    assert work.ids() == names(*range(1, 61))


@pytest.mark.long  # test_sharing.py does it with workers in one process
def test_a_message_that_two_have_is_run_by_one(rig: Rig) -> None:
    """The other one's comes back when the lease would have ended, and finds it done."""
    work = rig.batch({"wait": 1}, rings=False)
    both = [rig.start(), rig.start()]
    wait_for(lambda: all(process.events("engine ready") for process in both))
    work.ring(0, 0, 0, 0)
    wait_for(lambda: work.is_done and not rig.run(rig.queue.count()))
    assert both[0].requests() + both[1].requests() == ["c1"]
    assert work.num_left == 0


def test_what_a_killed_worker_made_durable_is_kept(rig: Rig) -> None:
    """kill -9 loses what was not written yet, and makes no suspects."""
    gate = rig.folder / "gate"
    work = rig.batch(*[GOOD] * 10, *[{"gate": str(gate)}] * 2)
    first = rig.start("--lease-seconds", 3, "--visibility-seconds", 4)
    wait_for(lambda: len(work.index()) == 10, lambda: first.log)
    first.kill()
    gate.touch()
    second = rig.start()
    wait_for(lambda: work.is_done, lambda: second.log)
    assert second.requests() == ["c11", "c12"]
    shard = work.shard()
    assert (shard.fence, shard.suspects, shard.quarantined) == (2, (), ())
    assert work.ids() == names(*range(1, 13))
    assert len({row["id"] for row in work.sealed()}) == 12


def test_a_worker_that_slept_through_its_lease_changes_nothing(rig: Rig) -> None:
    """The other worker has the shard by then: it writes no part, commits nothing, sends nothing."""
    work = rig.batch(GOOD, {"wait": 6}, {"wait": 6})
    zombie = rig.start("--lease-seconds", 2, "--flush-seconds", NEVER)
    wait_for(lambda: zombie.requests("finished") == ["c1"], lambda: zombie.log)
    zombie.send(signal.SIGSTOP)
    wait_for(lambda: work.shard().lease_until < time.time())
    other = rig.start("--lease-seconds", NEVER)
    work.ring()
    wait_for(lambda: len(other.requests()) == 3, lambda: other.log)
    zombie.send(signal.SIGCONT)
    wait_for(lambda: zombie.events("lease lost"), lambda: zombie.log)
    wait_for(lambda: work.is_done, lambda: other.log)
    assert work.shard().fence == 2
    assert zombie.events("part written") == []
    assert zombie.events("committed") == []
    assert work.ids() == names(1, 2, 3)
    assert work.num_left == 0


@pytest.mark.parametrize("number", with_long([signal.SIGTERM], [signal.SIGINT]))
def test_a_signal_gives_the_work_back(rig: Rig, number: signal.Signals) -> None:
    """Finished rows are kept, the next worker goes on at once, and no attempt is counted."""
    work = rig.batch(GOOD, {"wait": NEVER, "custom_id": "slow"}, GOOD)
    process = rig.start("--flush-seconds", NEVER, "--grace-seconds", 0.5)
    wait_for(lambda: len(process.requests("finished")) == 2, lambda: process.log)
    process.send(number)
    assert process.wait() == 0
    shard = work.shard()
    assert (shard.owner, shard.attempts, shard.suspects) == (None, 0, ())
    assert work.index().lines == {1, 3}
    assert rig.messages(rig.queue) == [{"batch_id": work.id, "shard": 0}]
    [released] = process.events("released")
    assert released["reason"] == "the worker stops"


def test_a_second_signal_ends_it_at_once(rig: Rig) -> None:
    """It acts like a kill: the lease ends by itself, and the engine with the worker."""
    work = rig.batch({"wait": NEVER})
    process = rig.start("--grace-seconds", 30)
    wait_for(lambda: has_begun(process), lambda: process.log)
    process.send(signal.SIGTERM)
    time.sleep(0.3)  # two signals of a kind that are not yet delivered are one
    process.send(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert work.shard().owner is not None


@pytest.mark.long  # test_worker.py cancels in one process
def test_a_cancel_stops_what_runs(rig: Rig) -> None:
    """Finished rows are committed; the worker continues with other batches."""
    work = rig.batch(GOOD, *[{"wait": NEVER}] * 5)
    process = rig.start("--max-inflight", 3)
    wait_for(lambda: len(process.requests()) == 4, lambda: process.log)
    work.move(Status.CANCELLING)
    wait_for(lambda: work.is_free, lambda: process.log)
    assert work.index().lines == {1}
    other = rig.batch(GOOD)
    wait_for(lambda: other.is_done, lambda: process.log)
    assert rig.messages()[0] == {"kind": "advance", "batch_id": work.id}


def test_a_line_that_kills_the_engine_twice_is_quarantined(rig: Rig) -> None:
    """The other lines of its shard get their rows; so do those of the concurrent shard."""
    bodies = [GOOD if n % 2 else SLOW for n in range(24)]
    bodies[7] = {"die": True, "wait": 0.05}
    work = rig.batch(*bodies, shard_lines=12)
    process = rig.start("--max-inflight", 8)
    wait_for(lambda: work.is_done, lambda: process.log)
    assert work.ids() == names(*(n for n in range(1, 25) if n != 8))
    [row] = work.sealed("errors")
    assert row["custom_id"] == "c8"
    assert row["response"]["body"]["error"]["code"] == "engine_killed"
    assert process.requests().count("c8") >= 2
    assert [event["line"] for event in process.events("quarantined")] == [8]
    assert "killed by SIGKILL" in {event["reason"] for event in process.events("engine died")}
    assert process.process.poll() is None


@pytest.mark.parametrize("how", with_long(["freeze"], ["hang"]))
def test_an_engine_that_hangs_is_killed(rig: Rig, how: str) -> None:
    """A request that hangs it each time ends like one that kills it."""
    work = rig.batch(GOOD, {how: True}, GOOD)
    process = rig.start(
        "--stall-seconds", 1, "--lease-seconds", 30, engine=["--stats-seconds", 0.2]
    )
    wait_for(lambda: work.is_done, lambda: process.log)
    assert work.ids() == names(1, 3)
    assert work.ids("errors") == ["c2"]
    reasons = {event["reason"] for event in process.events("engine died")}
    assert reasons
    assert all(reason.startswith("stalled: ") for reason in reasons)


def test_an_engine_that_cannot_start_ends_the_worker(rig: Rig) -> None:
    """The exit status is 1, with the engine's message, before any message is received."""
    work = rig.batch(GOOD)
    process = rig.start(engine=["--refuse", "no such model"])
    assert process.wait() == 1
    [event] = process.events("engine cannot be started")
    assert event["reason"] == "no such model"
    assert work.shard().fence == 0


def test_an_input_that_is_deleted_fails_the_batch(rig: Rig) -> None:
    """A shard in progress is finished, but the next one cannot be read."""
    work = rig.batch({"wait": 2}, GOOD, shard_lines=1, rings=False)
    process = rig.start("--max-inflight", 1, "--lease-seconds", 30)
    work.ring(0)
    wait_for(lambda: has_begun(process), lambda: process.log)
    source = work.batch.source
    rig.aws.clients["s3"].delete_object(
        Bucket=source.bucket, Key=source.key, VersionId=source.version_id
    )
    work.ring(1)
    wait_for(lambda: work.batch.status is Status.FINALIZING, lambda: process.log)
    wait_for(lambda: work.is_free, lambda: process.log)
    assert [error.code for error in work.batch.errors] == ["input_changed"]
    assert work.shard(1).status is ShardStatus.PENDING
    assert process.events("input changed")


def test_the_engine_ends_with_its_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill -9 leaves no process that holds the GPU."""
    monkeypatch.setenv(COLD_VARIABLE, "1")  # otherwise it has one more child
    rig.batch({"wait": NEVER})
    process = rig.start()
    wait_for(lambda: has_begun(process), lambda: process.log)
    children = f"/proc/{process.process.pid}/task/{process.process.pid}/children"
    with open(children, encoding="ascii") as file:  # noqa: PTH123 - the kernel's own file
        [child] = file.read().split()
    process.kill()
    wait_for(lambda: not os.path.exists(f"/proc/{child}"))  # noqa: PTH110


@pytest.mark.long  # test_sharing.py does it with workers in one process
def test_rows_do_not_depend_on_who_ran_them(rig: Rig) -> None:
    """A shard that was taken over has the bytes of one that was not."""
    bodies = [*[SLOW] * 5, {"wait": 6}]  # what the first is stopped before
    whole, broken = rig.batch(*bodies, rings=False), rig.batch(*bodies, rings=False)
    table = rig.deployment.table
    key = {"pk": f"BATCH#{broken.id}", "sk": "META"}
    created_at = whole.batch.created_at
    rig.run(table.update(key, {"created_at": created_at}, "attribute_exists(pk)", {}))
    flags = ("--max-inflight", 1)
    first = rig.start(*flags, "--grace-seconds", 0)
    wait_for(lambda: first.events("engine ready"), lambda: first.log)
    broken.ring()
    wait_for(lambda: len(broken.index()) >= 2, lambda: first.log)
    first.send(signal.SIGTERM)
    first.wait()
    whole.ring()
    second = rig.start(*flags)
    wait_for(lambda: whole.is_done and broken.is_done, lambda: second.log)
    assert broken.shard().fence == 2
    assert json.dumps(whole.sealed()) == json.dumps(broken.sealed())


@pytest.mark.long  # tests/localstack/test_batches.py runs the example file with it
def test_the_demo_model_runs_a_batch(rig: Rig) -> None:
    """The worker with the real engine: the answers of the model, and what it is, in the batch."""
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": request}
    work = rig.batch(json.dumps(line).encode() + b"\n", GOOD, rings=False)
    process = rig.start("--exit-when-idle", 1, engine=None)
    work.ring()
    assert process.wait() == 0, process.log
    [row] = work.sealed()
    assert "Paris" in row["response"]["body"]["choices"][0]["message"]["content"]
    [failed] = work.sealed("errors")
    assert failed["response"]["status_code"] == 400
    assert (
        work.shard().progress.completion_tokens
        == row["response"]["body"]["usage"]["completion_tokens"]
    )
    assert work.batch.engine.engine_version
