"""Message of a shard: hidden from other workers while the shard runs, then deleted or resent."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from ...aws.queues import MAX_DELAY_SECONDS, Message, parse_message, shard_message
from ...observability import logger
from ..context.context import WorkerContext

# SQS limits the visibility timeout to 12 hours after the receipt of a message.
_MAX_HELD_SECONDS = 11 * 3600


class ShardTarget(NamedTuple):
    """Shard that a message names."""

    batch_id: str
    shard: int
    is_escalated: bool = False


def parse_target(body: str) -> ShardTarget | None:
    """Return the shard that a message's body names, or None for an invalid body."""
    match parse_message(body):
        case {"batch_id": str(batch_id), "shard": int(shard)} if batch_id and shard >= 0:
            return ShardTarget(batch_id, shard)
        case {"batch_id": str(batch_id), "escalated_shard": int(shard)} if batch_id and shard >= 0:
            return ShardTarget(batch_id, shard, is_escalated=True)
    return None


class ShardMessage:
    """One received message; `target` is None for an invalid body. Nothing here may lose a shard.

    `waited_seconds` is its age when it was received, None if unknown; `group` is the tenant for
    whom it was sent.
    """

    def __init__(self, context: WorkerContext, message: Message) -> None:
        self._context = context
        self._message: Message | None = message
        self.group = message.group
        self._received_at = self._extended_at = context.clock()
        self.target = parse_target(message.body)
        waited_since = message.sent_at
        self.waited_seconds = (
            None if waited_since is None else max(0.0, context.wall() - waited_since)
        )

    @classmethod
    def unheld(cls, context: WorkerContext, target: ShardTarget, group: str | None) -> Self:
        """Return the message of a shard that was claimed without one: another one announces it."""
        message = cls(context, Message("", "", group=group))
        message._message, message.target = None, target
        return message

    @property
    def is_held(self) -> bool:
        """Return whether the message is held; otherwise it was deleted or resent."""
        return self._message is not None

    async def extend_visibility(self) -> None:
        """Extend the visibility timeout when due; called repeatedly."""
        message, now = self._message, self._context.clock()
        visibility_seconds = self._context.config.visibility_seconds
        if message is None or now < self._extended_at + visibility_seconds / 3:
            return
        if now >= self._received_at + _MAX_HELD_SECONDS:
            await self.resend(MAX_DELAY_SECONDS)
            return
        if not await self._context.aws.run(self._context.queue.hide(message, visibility_seconds)):
            logger.warning("message is no longer held", **self.labels)
        self._extended_at = now

    async def delete(self) -> None:
        """Delete the message from the queue."""
        if self._message is not None:
            await self._context.aws.run(self._context.queue.delete(self._message))
        self._message = None

    async def resend(self, delay_seconds: float = 0) -> None:
        """Replace this message by a fresh one, so that its receive count starts at zero."""
        assert self.target is not None
        batch_id, shard, is_escalated = self.target
        body = shard_message(batch_id, shard, is_escalated=is_escalated)
        sending = self._context.queue.send(body, group=self.group, delay_seconds=delay_seconds)
        await self._context.aws.run(sending)
        await self.delete()

    async def take_over(self, other: ShardMessage) -> None:
        """Hold another message of the same shard in place of this one, or delete it."""
        if self.is_held:
            await other.delete()
        else:
            self._message, self._received_at = other._message, other._received_at
            self._extended_at = other._extended_at

    @property
    def labels(self) -> dict[str, Any]:
        """Return the labels of log lines."""
        return self.target._asdict() if self.target is not None else {}
