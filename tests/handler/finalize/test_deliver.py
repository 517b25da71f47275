"""Results that a client wants to be put somewhere else."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.handler.finalize.rig import Cloud, Drop, plenty
from tests.net.receiver import HOST, PUBLIC, Receiver, Script
from tidemill.batch.model import Options
from tidemill.batch.states import Status
from tidemill.handler.finalize import deliver as delivery
from tidemill.handler.finalize.deliver import deliver
from tidemill.handler.finalize.publish import publish
from tidemill.handler.lifecycle.batch_lock import BatchLock, Requeue
from tidemill.net.pinned_connection import Network

OUTPUT_URL = f"https://{HOST}/out?X-Amz-Signature=0123456789abcdef%2B"
ERROR_URL = f"https://{HOST}/errors"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing between two tries."""
    monkeypatch.setattr(delivery, "_FIRST_DELAY_SECONDS", 0.0)


def finalizing(cloud: Cloud, **urls: str) -> Drop:
    """Return a batch whose shards are done, with a url for its output."""
    options = Options(**({"output_url": OUTPUT_URL} | urls))
    drop = cloud.drop(4, options=options).begin()
    drop.run_shard(0)
    return drop.move(Status.FINALIZING, outcome="completed")


def published(cloud: Cloud, time_left: Callable[[], float] = plenty) -> BatchLock:
    """Return a run of such a batch that has published its objects."""
    lock = BatchLock(cloud.aws, cloud.deployment, finalizing(cloud).batch, plenty)
    lock.acquire()
    publish(lock)
    lock.time_left = time_left
    return lock


def errors_of(drop: Drop) -> list[str]:
    """Return the messages among the batch's errors, all of which are about deliveries."""
    errors = drop.batch.errors
    assert {error.code for error in errors} <= {"output_delivery_failed"}
    return [error.message for error in errors]


def test_both_results_are_put_and_kept(mini: Cloud, tmp_path: Path) -> None:
    """Each object goes to its url once, whole, and stays in the bucket."""
    drop = finalizing(mini, error_url=ERROR_URL)
    with Receiver(tmp_path, Script(201)) as receiver:
        drop.finish(network=receiver.network())
    batch = drop.batch
    assert {got.path: got.body for got in receiver.received} == {
        OUTPUT_URL.removeprefix(f"https://{HOST}"): mini.read(batch.outputs.output_key),
        "/errors": mini.read(batch.outputs.error_key),
    }
    assert len(receiver.received) == 2
    assert (batch.output_delivery, batch.error_delivery) == ("delivered", "delivered")
    assert drop.report()["tidemill"]["output_delivery"] == "delivered"
    assert (batch.status, batch.errors) == (Status.COMPLETED, ())


def test_failures_of_the_server_are_tried_again(mini: Cloud, tmp_path: Path) -> None:
    """500 twice and then 200 is a delivery, uploaded once."""
    drop = finalizing(mini)
    with Receiver(tmp_path, Script(500), Script(500), Script(200)) as receiver:
        drop.finish(network=receiver.network(["8.8.8.8", "1.1.1.1"]))
    assert len(receiver.received) == 3
    assert [address for address, _ in receiver.dialled] == ["8.8.8.8", "1.1.1.1", "8.8.8.8"]
    assert (drop.batch.output_delivery, drop.batch.output_tries) == ("delivered", 3)
    assert drop.batch.errors == ()


def test_an_expired_url_is_reported_with_the_servers_message(mini: Cloud, tmp_path: Path) -> None:
    """A refusal is final; its message is in the Batch, truncated and without the signature."""
    drop = finalizing(mini)
    text = "Request has expired 0123456789abcdef%2B 0123456789abcdef+ " + "x" * 1000
    with Receiver(tmp_path, Script(403, text)) as receiver:
        drop.finish(network=receiver.network())
    assert len(receiver.received) == 1
    (message,) = errors_of(drop)
    assert "the server returned 403: Request has expired … … xxx" in message
    assert "0123456789abcdef" not in message
    assert drop.batch.outputs.output_key in message
    assert len(message) < 700
    assert drop.batch.errors[0].param == "output_url"
    assert (drop.batch.status, drop.batch.output_delivery) == (Status.COMPLETED, "failed")
    assert drop.ids("output") == ["c1", "c2", "c3"]


@pytest.mark.parametrize("script", [Script(403, "no PUT to {}"), Script(babbles="{}\r\n")])
def test_a_secret_path_is_not_reported(mini: Cloud, tmp_path: Path, script: Script) -> None:
    """A word in the path may grant write access, and a server may repeat it, at length."""
    word = "T0123456789ABCDEF"
    secret = f"{word} {'x' * 9999}"
    script = replace(
        script,
        text=script.text.format(secret),
        babbles=script.babbles and script.babbles.format(secret),
    )
    drop = finalizing(mini, output_url=f"https://{HOST}/put/{word}")
    with Receiver(tmp_path, script) as receiver:
        drop.finish(network=receiver.network())
    (message,) = errors_of(drop)
    assert "… xxx" in message
    assert word not in message
    assert len(message) < 700


def test_five_tries_are_all(mini: Cloud, tmp_path: Path) -> None:
    """A server that stays broken is given up, and its last reply is reported."""
    drop = finalizing(mini)
    with Receiver(tmp_path, Script(503, "come later")) as receiver:
        drop.finish(network=receiver.network())
    assert len(receiver.received) == 5
    assert "the server returned 503: come later" in errors_of(drop)[0]
    assert drop.batch.status is Status.COMPLETED


def test_the_wait_between_tries_doubles(
    mini: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue's delay is the wait: seconds at first, then longer."""
    monkeypatch.undo()
    lock = published(mini)
    delays = []
    with Receiver(tmp_path, Script(429)) as receiver:
        for _ in range(4):
            with pytest.raises(Requeue) as pause:
                deliver(lock, receiver.network())
            delays.append(pause.value.delay_seconds)
        deliver(lock, receiver.network())
    assert delays == [2, 4, 8, 16]
    assert lock.batch.output_delivery == "failed"


def test_a_server_that_stalls_is_a_failed_try(mini: Cloud, tmp_path: Path) -> None:
    """No progress for a while ends the try, and the next one may do."""
    drop = finalizing(mini)
    with Receiver(tmp_path, Script(hangs=True), Script(200)) as receiver:
        drop.finish(network=receiver.network(stall_seconds=0.3))
    assert (drop.batch.output_delivery, drop.batch.output_tries) == ("delivered", 2)


def test_a_redirect_leads_nowhere(mini: Cloud, tmp_path: Path) -> None:
    """A redirect is a failure at once; what it names is not dialled."""
    drop = finalizing(mini)
    script = Script(302, headers={"Location": "https://169.254.169.254/"})
    with Receiver(tmp_path, script) as receiver:
        drop.finish(network=receiver.network())
    assert receiver.dialled == [(PUBLIC, 443)]
    assert "the server returned 302: redirects are not followed" in errors_of(drop)[0]


def test_an_address_inside_is_not_dialled(mini: Cloud, tmp_path: Path) -> None:
    """A host that resolves to the metadata address is refused without a word to it."""
    drop = finalizing(mini)
    with Receiver(tmp_path, Script()) as receiver:
        drop.finish(network=receiver.network(["169.254.169.254"]))
    assert receiver.dialled == []
    assert f"{HOST} is not a public host" in errors_of(drop)[0]
    assert drop.batch.output_tries == 1


def test_a_host_that_is_not_found_is_looked_up_again(mini: Cloud) -> None:
    """A name that does not resolve may do so at the next try."""

    def resolve(host: str, port: int) -> list[str]:
        raise OSError(f"no address for {host}:{port}")

    drop = finalizing(mini)
    drop.finish(network=Network(resolve=resolve))
    assert drop.batch.output_tries == 5
    assert "host not found" in errors_of(drop)[0]


def test_a_try_is_counted_before_it_begins(mini: Cloud, tmp_path: Path) -> None:
    """A run that dies in a try has used it up, so an upload that never ends is given up too."""
    lock = published(mini)

    class Died(BaseException):
        pass

    def die(*_: object) -> list[str]:
        raise Died

    for tries in range(1, 6):
        with pytest.raises(Died):
            deliver(lock, Network(resolve=die))
        assert lock.batch.output_tries == tries
    with Receiver(tmp_path, Script()) as receiver:
        deliver(lock, receiver.network())
    assert receiver.received == []
    assert "did not finish" in lock.batch.errors[0].message


def test_a_run_that_is_nearly_over_begins_no_try(mini: Cloud, tmp_path: Path) -> None:
    """Near the deadline the try is left to the next run, and none is used up."""
    lock = published(mini, time_left=lambda: 1.0)
    with Receiver(tmp_path, Script()) as receiver, pytest.raises(Requeue):
        deliver(lock, receiver.network())
    assert (receiver.received, lock.batch.output_tries) == ([], 0)


def test_time_that_ends_in_a_try_breaks_it_off(mini: Cloud, tmp_path: Path) -> None:
    """An upload that outlasts its run is broken off, and another run tries again."""
    looks = iter([100.0, 100.0])
    lock = published(mini, time_left=lambda: next(looks, 0.0))
    with Receiver(tmp_path, Script()) as receiver:
        with pytest.raises(Requeue):
            deliver(lock, receiver.network())
        assert (lock.batch.output_tries, lock.batch.output_delivery) == (1, None)
        lock.time_left = plenty
        deliver(lock, receiver.network())
    assert lock.batch.output_delivery == "delivered"


def slow(lock: BatchLock, seconds: float) -> Network:
    """Return a network in which each try takes that many seconds and fails."""
    over = lock.now() + seconds

    def connect(*_: object) -> socket.socket:
        lock.now = lambda: over
        raise TimeoutError

    return Network(resolve=lambda *_: [PUBLIC], connect=connect)


def test_slow_receivers_of_a_tenant_are_waited_for_no_longer(
    mini: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five minutes of it another run looks again, and no try is used up."""
    monkeypatch.undo()
    lock = published(mini)
    began = time.time() // 600 * 600 + 600
    for seconds in (5.0, 301.0):
        lock.now = lambda: began
        with pytest.raises(Requeue):
            deliver(lock, slow(lock, seconds))
    lock.now = lambda: began + 599
    with Receiver(tmp_path, Script()) as receiver:
        with pytest.raises(Requeue) as pause:
            deliver(lock, receiver.network())
        assert (pause.value.delay_seconds, lock.batch.output_tries) == (60.0, 2)
        assert receiver.received == []
        lock.now = lambda: began + 600
        deliver(lock, receiver.network())
    assert lock.batch.output_delivery == "delivered"
    (counted,) = mini.run(mini.deployment.usage.query("USAGE#owner", "WAITED#"))
    assert 300 < counted["seconds"] <= 301


def test_bytes_that_are_taken_too_slowly_are_taken_back(
    mini: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute, and as long as the slowest of hosts may take: then the try has failed."""
    clock = count(0, 25)
    monkeypatch.setattr("tidemill.net.pinned_connection.monotonic", lambda: next(clock))
    drop = finalizing(mini)
    with Receiver(tmp_path, Script(200)) as receiver:
        drop.finish(network=receiver.network())
    assert not any(got.body for got in receiver.received)
    assert "TimeoutError: it reads the upload too slowly" in errors_of(drop)[0]


def test_what_is_delivered_is_not_put_again(mini: Cloud, tmp_path: Path) -> None:
    """A run that comes after a delivery goes past it."""
    lock = published(mini)
    with Receiver(tmp_path, Script()) as receiver:
        deliver(lock, receiver.network())
        deliver(lock, receiver.network())
    assert len(receiver.received) == 1
