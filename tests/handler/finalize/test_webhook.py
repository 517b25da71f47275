"""Webhooks: the events that a receiver gets, their retries, and their status in the Batch."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from openai import InvalidWebhookSignatureError

from tests.emulators import Emulator, active_ids
from tests.handler.finalize.webhook_rig import URL, WAYS, Ended, ended, secret_of, understood
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tests.net.receiver import HOST, Receiver, Script
from tidemill.batch.states import Status
from tidemill.handler.control.advance import advance
from tidemill.handler.control.reaper import reap
from tidemill.handler.finalize import webhook
from tidemill.handler.finalize.webhook import DELAYS_SECONDS, MAX_TRIES
from tidemill.handler.lifecycle.announce import announce
from tidemill.handler.lifecycle.cancel import cancel
from tidemill.net.pinned_connection import Network


@pytest.fixture
def cloud(ministack: Emulator) -> Cloud:
    """Return a separate deployment."""
    return Cloud.on(ministack)


@pytest.fixture
def secret(cloud: Cloud) -> str:
    """Return the secret of the tenant `default`."""
    return secret_of(cloud)


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Receiver]:
    """Return a receiver that is content."""
    with Receiver(tmp_path, Script(204)) as receiver:
        yield receiver


@pytest.mark.parametrize("status", WAYS)
def test_a_receiver_is_notified_of_each_end(
    cloud: Cloud, secret: str, hook: Receiver, status: Status
) -> None:
    """The event is OpenAI's, signed for its SDK, and goes to the URL that the batch requested."""
    batch = ended(cloud, status)
    batch.send_webhook(hook.network())
    (got,) = hook.received
    assert (got.method, got.host) == ("POST", HOST)
    assert got.path == URL.removeprefix(f"https://{HOST}")
    event = understood(got, secret)
    assert (event.type, event.object) == (f"batch.{status}", "event")
    assert event.data.id == batch.id
    assert event.created_at == getattr(batch.batch, f"{status}_at")
    assert event.id == got.headers["webhook-id"]
    assert got.headers["content-type"] == "application/json"
    final = batch.batch
    assert (final.webhook_delivery, final.webhook_tries, final.webhook_due) == (
        "delivered",
        1,
        None,
    )
    assert [(each.status_code, each.error) for each in final.webhook_log] == [(204, None)]
    assert not batch.is_active


def test_a_signature_holds_for_its_own_bytes_only(
    cloud: Cloud, secret: str, hook: Receiver
) -> None:
    """Another secret, body, id or time is found out."""
    ended(cloud).send_webhook(hook.network())
    (got,) = hook.received
    forged = [
        got._replace(body=got.body + b" "),
        got._replace(headers=got.headers | {"webhook-id": "evt_1"}),
        got._replace(headers=got.headers | {"webhook-timestamp": str(int(time.time()) - 60)}),
    ]
    for wrong in forged:
        with pytest.raises(InvalidWebhookSignatureError):
            understood(wrong, secret)
    with pytest.raises(InvalidWebhookSignatureError):
        understood(got, secret_of(cloud, "search"))


def test_a_new_secret_and_the_old_one_both_sign(cloud: Cloud, secret: str, hook: Receiver) -> None:
    """Both sign for a day, so that a receiver with either secret accepts the event."""
    new = secret_of(cloud)
    batch = ended(cloud)
    batch.send_webhook(hook.network())
    assert understood(hook.received[0], secret) == understood(hook.received[0], new)
    later = ended(cloud)
    later.at += 25 * 3600
    later.send_webhook(hook.network())
    assert len(hook.received[1].headers["webhook-signature"].split()) == 1


def test_a_receiver_that_fails_is_notified_again_and_again(
    cloud: Cloud, secret: str, tmp_path: Path
) -> None:
    """It gets nine tries in a day, each with the same event and a new time; then it is given up."""
    del secret
    batch = ended(cloud)
    with Receiver(tmp_path, Script(500, "down")) as hook:
        for number in range(1, MAX_TRIES + 1):
            assert batch.is_active
            batch.send_webhook(hook.network())
            assert len(hook.received) == batch.batch.webhook_tries == number
            if number < MAX_TRIES:
                batch.send_webhook(hook.network())  # none is due
                batch.wait()
        batch.send_webhook(hook.network())
    assert len(hook.received) == MAX_TRIES == 9
    final = batch.batch
    assert (final.webhook_delivery, final.webhook_due) == ("failed", None)
    assert {(each.status_code, each.error) for each in final.webhook_log} == {(500, "down")}
    assert not batch.is_active
    ids = {(got.headers["webhook-id"], got.body) for got in hook.received}
    assert len(ids) == 1
    times = [int(got.headers["webhook-timestamp"]) for got in hook.received]
    assert [each.at for each in final.webhook_log] == times
    assert [later - earlier for earlier, later in pairwise(times)] == list(DELAYS_SECONDS)
    # What is longer than a queue can wait is left to the reaper.
    assert batch.delays == [5, 60, 300, 900]
    assert times[-1] - times[0] < 24 * 3600


def test_a_receiver_that_is_gone_is_left_alone(cloud: Cloud, secret: str, tmp_path: Path) -> None:
    """A 410 means that the receiver is gone."""
    del secret
    batch = ended(cloud)
    with Receiver(tmp_path, Script(410, "no more")) as hook:
        batch.send_webhook(hook.network())
        batch.at += 24 * 3600
        batch.send_webhook(hook.network())
    assert len(hook.received) == 1
    assert batch.batch.webhook_delivery == "failed"
    assert not batch.is_active


@pytest.mark.parametrize(
    ("script", "status_code", "words"),
    [
        (Script(302, headers={"Location": "https://169.254.169.254/"}), 302, "redirects are not"),
        (Script(hangs=True), None, "TimeoutError"),
        (Script(drips="headers"), None, "TimeoutError"),
        (Script(500, "T0123456789ABCDEF 0123456789abcdef " + "x" * 9999), 500, "… … xxx"),
        (Script(404), 404, ""),
        (Script(babbles="0123456789abcdef\r\n"), None, "BadStatusLine: …"),
    ],
)
def test_failures_are_in_the_log(
    cloud: Cloud, secret: str, tmp_path: Path, *, script: Script, status_code: int, words: str
) -> None:
    """They are short, and without the parts of the URL that may be secret; another try follows."""
    del secret
    batch = ended(cloud)
    with Receiver(tmp_path, script, Script(200)) as hook:
        batch.send_webhook(hook.network(stall_seconds=0.3))
        (tried,) = batch.batch.webhook_log
        assert tried.status_code == status_code
        assert tried.error is not None
        assert words in tried.error
        assert len(tried.error) <= 200
        assert "0123456789" not in tried.error
        assert {port for _, port in hook.dialled} == {443}
        assert len(hook.dialled) == 1
        batch.wait()
        batch.send_webhook(hook.network())
    assert batch.batch.webhook_delivery == "delivered"


def test_endless_content_is_not_a_failure(cloud: Cloud, secret: str, tmp_path: Path) -> None:
    """After a status of 200 the delivery has succeeded, whatever content follows."""
    del secret
    batch = ended(cloud)
    with Receiver(tmp_path, Script(drips="text")) as hook:
        batch.send_webhook(hook.network(stall_seconds=0.3))
    assert batch.batch.webhook_delivery == "delivered"


def test_an_address_inside_is_not_dialled(cloud: Cloud, secret: str, hook: Receiver) -> None:
    """A host that leads to the metadata address gets no word; it may lead elsewhere later."""
    del secret
    batch = ended(cloud)
    batch.send_webhook(hook.network(["169.254.169.254"]))
    assert hook.dialled == []
    assert batch.batch.webhook_log[0].error == f"{HOST} is not a public host"
    batch.wait()
    batch.send_webhook(hook.network())
    assert batch.batch.webhook_delivery == "delivered"


def test_one_of_two_concurrent_runs_tries(cloud: Cloud, secret: str, hook: Receiver) -> None:
    """Both have read the batch before either began."""
    del secret
    batch = ended(cloud)
    seen = batch.batch
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: batch.send_webhook(hook.network(), batch=seen), range(4)))
    assert len(hook.received) == 1
    assert batch.batch.webhook_tries == 1


def test_a_run_that_dies_takes_its_try_with_it(cloud: Cloud, secret: str, hook: Receiver) -> None:
    """The next one is due all the same, and a batch whose tries all died is given up."""
    del secret
    batch = ended(cloud)

    class Died(BaseException):
        pass

    def die(*_: object) -> list[str]:
        raise Died

    for tries in range(1, MAX_TRIES + 1):
        with pytest.raises(Died):
            batch.send_webhook(Network(resolve=die))
        assert batch.batch.webhook_tries == tries
        # Its death is unknown: as long as it may be under way there is no other try.
        batch.at += 55
        batch.send_webhook(hook.network())
        batch.wait()
    batch.send_webhook(hook.network())
    assert hook.received == []
    (tried,) = batch.batch.webhook_log
    assert "did not finish" in str(tried.error)
    assert batch.batch.webhook_delivery == "failed"
    assert not batch.is_active


def test_a_run_that_is_nearly_over_leaves_the_try_to_another(
    cloud: Cloud, secret: str, hook: Receiver
) -> None:
    """It rings, and no try is used up."""
    del secret
    batch = ended(cloud)
    batch.send_webhook(hook.network(), time_left=lambda: 30.0)
    assert (hook.received, batch.batch.webhook_tries, batch.delays) == ([], 0, [0])


def test_a_run_that_was_overtaken_changes_nothing(
    cloud: Cloud, secret: str, hook: Receiver
) -> None:
    """It was held up for so long that another has tried meanwhile: what that one found counts."""
    del secret
    batch = ended(cloud)

    def held_up(*_: object) -> list[str]:
        batch.wait()
        batch.send_webhook(hook.network())
        raise OSError

    batch.send_webhook(Network(resolve=held_up))
    final = batch.batch
    assert (final.webhook_delivery, final.webhook_tries) == ("delivered", 2)
    assert [each.status_code for each in final.webhook_log] == [204]
    assert not batch.is_active
    assert batch.delays == []


def test_a_try_ends_soon_whatever_the_receiver_does(
    cloud: Cloud, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifteen seconds for all steps together: what one has taken the others have not."""
    del secret
    batch, waits, clock = ended(cloud), [], iter([0.0, 0.0])
    monkeypatch.setattr("tidemill.net.pinned_connection.monotonic", lambda: next(clock, 14.875))
    with Receiver(tmp_path, Script(hangs=True)) as hook:
        network = hook.network()

        def connect(place: tuple[str, int], timeout_seconds: float) -> socket.socket:
            waits.append(timeout_seconds)
            return network.connect(place, timeout_seconds)

        batch.send_webhook(replace(network, connect=connect))
    assert waits == [15.0]
    assert batch.batch.webhook_log[0].error == "TimeoutError: timed out after 0.125 s"


def slow(batch: Ended, seconds: float) -> Network:
    """Return a network in which each try takes that many seconds and fails."""

    def resolve(*_: object) -> list[str]:
        batch.at += seconds
        raise TimeoutError

    return Network(resolve=resolve)


def test_slow_receivers_of_one_tenant_hold_few_runs(
    cloud: Cloud, secret: str, hook: Receiver
) -> None:
    """After five minutes of waiting its tries fail unsent, for ten at most; others' do not."""
    del secret
    secret_of(cloud, "search")
    batches = [ended(cloud) for _ in range(6)]
    began = batches[0].at // 600 * 600 + 600
    for batch in batches[:4]:
        batch.at = began
        batch.send_webhook(slow(batch, 75.0))
    fifth, sixth = batches[4:]
    fifth.at = sixth.at = began + 60
    fifth.send_webhook(hook.network())
    assert hook.received == []
    final = fifth.batch
    assert (final.webhook_delivery, final.webhook_tries) == ("pending", 1)
    assert "too slowly" in str(final.webhook_log[0].error)
    others = ended(cloud, tenant="search")
    others.at = began + 60
    others.send_webhook(hook.network())
    assert len(hook.received) == 1
    sixth.at = began + 600
    sixth.send_webhook(hook.network())
    assert sixth.batch.webhook_delivery == "delivered"


def test_quick_tries_are_not_counted(cloud: Cloud, secret: str, hook: Receiver) -> None:
    """Any number of them is allowed, because they delay no run."""
    del secret
    batches = [ended(cloud) for _ in range(3)]
    for batch in batches[:2]:
        batch.send_webhook(slow(batch, 5.0))
    batches[2].send_webhook(hook.network())
    assert cloud.run(cloud.deployment.usage.query("USAGE#default", "WAITED#")) == []


def test_each_try_uses_the_tenants_current_url(cloud: Cloud, secret: str, tmp_path: Path) -> None:
    """A corrected URL gets the undelivered event; without a URL the tries end."""
    tenants = cloud.deployment.tenants
    cloud.run(tenants.change("default", webhook_url=f"https://{HOST}/old"))
    first, second = ended(cloud, url=None), ended(cloud, url=None)
    third = ended(cloud, url=f"https://{HOST}/own")
    with Receiver(tmp_path, Script(500)) as hook:
        first.send_webhook(hook.network())
        cloud.run(tenants.change("default", webhook_url=f"https://{HOST}/new"))
        first.wait()
        first.send_webhook(hook.network())
        assert [got.path for got in hook.received] == ["/old", "/new"]
        assert understood(hook.received[1], secret).data.id == first.id
        third.send_webhook(hook.network())
        assert hook.received.pop().path == "/own"
        third.wait()
        cloud.run(tenants.change("default", webhook_url=None))
        second.send_webhook(hook.network())
        third.send_webhook(hook.network())
    assert [got.path for got in hook.received] == ["/old", "/new", "/own"]
    assert second.batch.webhook_delivery == "failed"
    assert second.batch.webhook_log[0].error == "the tenant no longer has a webhook"


def test_an_end_rings_once_wherever_it_came(cloud: Cloud, secret: str) -> None:
    """If the API's Lambda cancels a batch, the control Lambda sends its event, as for any other."""
    del secret
    batch = cloud.create(lines_of(1), metadata={"webhook-url": URL})
    cloud.messages()
    cloud.run(cancel(cloud.deployment, batch.id, int(time.time())))
    assert cloud.messages() == [{"kind": "advance", "batch_id": batch.id}]
    assert cloud.run(active_ids(cloud.deployment.table)) == [batch.id]
    cloud.run(announce(cloud.deployment, cloud.batch(batch.id)))
    assert cloud.messages() == []


def test_the_message_makes_the_control_lambda_tell(
    cloud: Cloud, secret: str, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed delivery does not delay the batch's end, which was reported before."""
    monkeypatch.setattr(webhook, "Network", hook.network)
    batch = ended(cloud, Status.CANCELLED)
    advance(cloud.aws, cloud.deployment, batch.id, plenty)
    advance(cloud.aws, cloud.deployment, batch.id, plenty)
    assert [understood(got, secret).data.id for got in hook.received] == [batch.id]


def test_the_reaper_rings_for_a_try_that_is_overdue(
    cloud: Cloud, secret: str, tmp_path: Path
) -> None:
    """It sends lost first messages, and those that are due later than a queue can wait."""
    del secret
    batch = ended(cloud)
    cloud.run(announce(cloud.deployment, batch.batch))
    rung = [{"kind": "advance", "batch_id": batch.id}]
    assert cloud.messages() == rung

    def reaped(after_seconds: float) -> list[dict[str, object]]:
        reap(cloud.aws, cloud.deployment, int(batch.at + after_seconds))
        return cloud.messages()

    assert reaped(5) == []
    assert reaped(60) == rung
    with Receiver(tmp_path, Script(500), Script(200)) as hook:
        batch.send_webhook(hook.network())
        batch.wait()
        assert reaped(0) == []
        assert reaped(60) == rung
        batch.send_webhook(hook.network())
    assert reaped(3600) == []


def test_a_webhook_needs_a_secret(cloud: Cloud) -> None:
    """A drop that requests a webhook fails with a command as advice; no receiver is notified."""
    batch = cloud.create(lines_of(1), metadata={"webhook-url": URL})
    assert batch.webhook_delivery is None
    (error,) = batch.errors
    assert error.param == "webhook-url"
    assert "`tidemill tenants set default --new-webhook-secret`" in error.message
    assert cloud.ingest(batch).status is Status.FAILED


def test_a_drop_with_a_wrong_option_notifies_the_tenants_webhook(cloud: Cloud, secret: str) -> None:
    """Its owner must learn that it has failed."""
    del secret
    cloud.run(cloud.deployment.tenants.change("default", webhook_url=URL))
    batch = cloud.create(lines_of(1), metadata={"completion-window": "soon"})
    assert [error.param for error in batch.errors] == ["completion-window"]
    assert (batch.webhook_delivery, batch.webhook_host) == ("pending", HOST)
    assert batch.options.metadata == {}
