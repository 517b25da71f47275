"""The message that a worker holds while it runs a shard, and how it is kept or answered."""

from __future__ import annotations

from typing import Any, NamedTuple

from handler.aws.queues import MAX_DELAY_SECONDS, Message, parse_message, shard_message
from handler.log import logger
from handler.worker.site.site import Site

# SQS forgets that a message is held 12 hours after it was received.
_MAX_HELD_SECONDS = 11 * 3600


class Target(NamedTuple):
    """The shard that a message rings for."""

    batch_id: str
    shard: int


def parse_target(body: str) -> Target | None:
    """Return the shard that a message's body names, or None for nonsense."""
    match parse_message(body):
        case {"batch_id": str(batch_id), "shard": int(shard)} if batch_id and shard >= 0:
            return Target(batch_id, shard)
    return None


class Doorbell:
    """One received message; `target` is None for nonsense. Nothing here may lose a shard.

    `waited_seconds` is how old it was when it was received, None where that is not told; `group`
    is the tenant for whom it was sent.
    """

    def __init__(self, site: Site, message: Message) -> None:
        self._site = site
        self._message: Message | None = message
        self.group = message.group
        self._received_at = self._kept_at = site.clock()
        self.target = parse_target(message.body)
        waited_since = message.sent_at
        self.waited_seconds = None if waited_since is None else max(0.0, site.wall() - waited_since)

    @property
    def is_held(self) -> bool:
        """Say whether there is a message; a copy may be on its way where there is none."""
        return self._message is not None

    async def keep(self) -> None:
        """Keep the message hidden once that is due; called again and again."""
        message, now = self._message, self._site.clock()
        visibility_seconds = self._site.config.visibility_seconds
        if message is None or now < self._kept_at + visibility_seconds / 3:
            return
        if now >= self._received_at + _MAX_HELD_SECONDS:
            await self.ring_again(MAX_DELAY_SECONDS)
            return
        if not await self._site.aws.run(self._site.queue.hide(message, visibility_seconds)):
            logger.warning("message not held any more", **self.labels)
        self._kept_at = now

    async def dismiss(self) -> None:
        """Take the message off the queue."""
        if self._message is not None:
            await self._site.aws.run(self._site.queue.delete(self._message))
        self._message = None

    async def ring_again(self, delay_seconds: float = 0) -> None:
        """Put a fresh message in the place of this one, so that no failure is counted for it."""
        assert self.target is not None
        body = shard_message(*self.target)
        sending = self._site.queue.send(body, group=self.group, delay_seconds=delay_seconds)
        await self._site.aws.run(sending)
        await self.dismiss()

    async def take_over(self, other: Doorbell) -> None:
        """Hold another message for the same shard in the place of this one, or dismiss it."""
        if self.is_held:
            await other.dismiss()
        else:
            self._message, self._received_at = other._message, other._received_at
            self._kept_at = other._kept_at

    @property
    def labels(self) -> dict[str, Any]:
        """Return what log lines say of it."""
        return self.target._asdict() if self.target is not None else {}
