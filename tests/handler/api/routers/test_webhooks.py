"""Webhooks requested by API clients, and the delivery status in the Batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.handler.finalize.webhook_rig import secret_of, understood
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tests.net.receiver import HOST, Receiver, Script
from tidemill.batch.model import Batch
from tidemill.handler.control.advance import advance
from tidemill.handler.finalize import webhook

URL = f"https://{HOST}/hooks?token=0123456789abcdef"


def made(client: OpenAI, **ours: Any) -> Any:
    """Return a new batch."""
    file = client.files.create(file=lines_of(1), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_body=ours,
    )


def shown(client: OpenAI, batch_id: str) -> Any:
    """Return the webhook field of the Batch."""
    return client.batches.retrieve(batch_id).to_dict()["tidemill"]["webhook"]


def test_the_batch_shows_its_webhooks_delivery(
    cloud: Cloud, client: OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning it shows the host, the delivery state, and each try; never the URL."""
    secret = secret_of(cloud)
    batch = made(client, webhook_url=URL)
    assert shown(client, batch.id) == {"host": HOST, "status": "pending", "attempts": []}
    client.batches.cancel(batch.id)
    with Receiver(tmp_path, Script(500, "later"), Script(204)) as hook:
        monkeypatch.setattr(webhook, "Network", hook.network)
        advance(cloud.aws, cloud.deployment, batch.id, plenty)
        tried = shown(client, batch.id)
        assert tried["status"] == "pending"
        assert [(each["status_code"], each["error"]) for each in tried["attempts"]] == [
            (500, "later")
        ]
        due = cloud.batch(batch.id).webhook_due
        assert due is not None
        advance(cloud.aws, cloud.deployment, batch.id, plenty, now=lambda: due)
    final = shown(client, batch.id)
    assert (final["status"], len(final["attempts"])) == ("delivered", 2)
    assert final["attempts"][1] == {"at": due, "status_code": 204, "error": None}
    event = understood(hook.received[-1], secret)
    assert (event.type, event.data.id) == ("batch.cancelled", batch.id)
    assert "0123456789abcdef" not in json.dumps(client.batches.retrieve(batch.id).to_dict())


def test_the_tenants_webhook_is_the_default_of_its_batches(cloud: Cloud, client: OpenAI) -> None:
    """A batch of a tenant without one notifies no receiver."""
    assert shown(client, made(client).id) is None
    secret_of(cloud)
    cloud.run(cloud.deployment.tenants.change("default", webhook_url="https://hooks.example.org/x"))
    assert shown(client, made(client).id)["host"] == "hooks.example.org"
    assert shown(client, made(client, webhook_url=URL).id)["host"] == HOST


def test_a_webhook_without_a_secret_is_refused(cloud: Cloud, client: OpenAI) -> None:
    """The command that makes one is named; another tenant's secret is none, and nothing is made."""
    secret_of(cloud, "others")
    with pytest.raises(openai.BadRequestError) as caught:
        made(client, webhook_url=URL)
    assert caught.value.param == "webhook_url"
    assert "`tidemill tenants set default --new-webhook-secret`" in caught.value.message
    assert list(client.batches.list()) == []


@pytest.mark.parametrize("url", ["http://example.com", "https://", "https://u:p@example.com", 3])
def test_a_url_that_cannot_be_is_refused_at_once(cloud: Cloud, client: OpenAI, url: object) -> None:
    """The rules are those of `output_url`, and the error does not repeat the URL."""
    secret_of(cloud)
    with pytest.raises(openai.BadRequestError) as caught:
        made(client, webhook_url=url)
    assert caught.value.param == "webhook_url"
    assert "u:p@" not in caught.value.message


def test_a_repeated_request_with_another_webhook_is_another_request(
    cloud: Cloud, client: OpenAI
) -> None:
    """It is an option as any other."""
    secret_of(cloud)
    file = client.files.create(file=lines_of(1), purpose="batch")

    def make(url: str) -> Batch:
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_body={"webhook_url": url, "idempotency_key": "k"},
        )
        return cloud.batch(batch.id)

    assert make(URL) == make(URL)
    with pytest.raises(openai.BadRequestError) as caught:
        make(f"{URL}2")
    assert caught.value.code == "idempotency_key_reused"
