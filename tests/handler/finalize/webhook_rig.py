"""Ended batches with a pending webhook, and receivers of their events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from tests.emulators import Emulator, active_ids
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tests.net.receiver import HOST, Received
from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.sync import Aws
from tidemill.handler.finalize.webhook import send_webhook
from tidemill.net.pinned_connection import Network

URL = f"https://{HOST}/hooks/T0123456789ABCDEF?token=0123456789abcdef"
WAYS = {
    Status.COMPLETED: (Status.IN_PROGRESS, Status.FINALIZING, Status.COMPLETED),
    Status.FAILED: (Status.FAILED,),
    Status.EXPIRED: (Status.EXPIRED,),
    Status.CANCELLED: (Status.CANCELLING, Status.CANCELLED),
}


class Watched(Aws):
    """Sends calls as always and remembers the delays of messages that were sent."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__(emulator.client)
        self.delays: list[int] = []

    def _send(self, call: Call) -> Any:
        if call.method == "send_message":
            self.delays.append(call.arguments.get("DelaySeconds", 0))
        return super()._send(call)


@dataclass
class Ended:
    """A batch that has ended, with a separate clock."""

    cloud: Cloud
    id: str
    at: float = field(default_factory=time.time)
    delays: list[int] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        """Return the batch as it is now."""
        return self.cloud.batch(self.id)

    @property
    def is_active(self) -> bool:
        """Say whether the reaper still looks at it."""
        return self.id in self.cloud.run(active_ids(self.cloud.deployment.table))

    def send_webhook(
        self,
        network: Network,
        *,
        time_left: Callable[[], float] = plenty,
        batch: Batch | None = None,
    ) -> None:
        """Let a run come that looks whether a try is due."""
        aws = Watched(self.cloud.emulator)
        send_webhook(
            aws,
            self.cloud.deployment,
            batch or self.batch,
            time_left,
            now=lambda: self.at,
            network=network,
        )
        self.delays += aws.delays

    def wait(self) -> None:
        """Let the time pass until the next try is due."""
        due = self.batch.webhook_due
        assert due is not None
        self.at = due


def secret_of(cloud: Cloud, tenant: str = "default") -> str:
    """Give a tenant a new secret and return it."""
    now = int(time.time())
    secret = cloud.run(cloud.deployment.tenants.renew_secret(tenant, now)).webhook_secret
    assert secret is not None
    return secret


def ended(
    cloud: Cloud,
    status: Status = Status.COMPLETED,
    *,
    url: str | None = URL,
    tenant: str = "default",
) -> Ended:
    """Return a batch that has just come to this end; `url` is its own webhook."""
    batch = cloud.create(lines_of(1), metadata={"webhook-url": url} if url else None)
    assert batch.webhook_delivery == "pending"
    key = {"pk": f"BATCH#{batch.id}", "sk": "META"}
    cloud.run(cloud.deployment.table.update(key, {"tenant": tenant}))
    now = int(time.time())
    for step in WAYS[status]:
        cloud.run(cloud.deployment.table.move_batch(batch.id, step, now, ended_at=now))
    return Ended(cloud, batch.id)


def understood(received: Received, secret: str) -> Any:
    """Return the event as OpenAI's SDK gives it to a receiver; raises for a wrong signature."""
    client = OpenAI(api_key="none", webhook_secret=secret)
    return client.webhooks.unwrap(received.body, received.headers)
