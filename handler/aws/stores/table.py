"""Operations on batches: the source of truth, changed by conditional writes only.

Any write may have happened although its reply was lost, and is then sent again. If its own
condition then fails, the operation reads the item and recognises its own write as success.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tidemill.batch.creation_order import creation_key
from tidemill.batch.model import Batch, Outputs
from tidemill.batch.object_keys import is_drop, results_name
from tidemill.batch.states import TERMINAL, Status, sources_of

from ...errors import ConditionFailed
from ..calls import Call, Operation
from ..items import dump, from_item, load, to_item
from .drops import Arrival, drop_item, drop_key, is_overtaken, known_batch
from .shards import ShardStore, batch_key
from .store import condition, expression, nothing_there, present

TENANT_INDEX = "by_tenant"
ACTIVE = "ACTIVE"
# Sorts after all digits, with which the entries of batches begin, and before those of files.
_LAST_BATCH = ":"


class MoveResult(NamedTuple):
    """The current batch, and whether it has the requested status."""

    batch: Batch | None
    is_there: bool


class LockAttempt(NamedTuple):
    """The current batch, and whether the caller has acquired its lock."""

    batch: Batch | None
    is_acquired: bool


class Table(ShardStore):
    """Creates operations on batches and shards in one DynamoDB table."""

    __slots__ = ()

    def get_batch(self, batch_id: str) -> Operation[Batch | None]:
        """Return the current batch, or None if there is none with this ID."""
        fields = yield from self.get(batch_key(batch_id))
        return load(Batch, fields) if fields else None

    def create_batch(self, batch: Batch) -> Operation[Batch]:
        """Record a new batch, or return the existing one with its ID."""
        try:
            yield self.transact(*self._creation(batch))
        except ConditionFailed:
            existing = yield from self.get_batch(batch.id)
            if existing is None:
                raise
            return existing
        return batch

    def create_drop(self, batch: Batch, arrival: Arrival) -> Operation[Batch | None]:
        """Record the batch of an upload, or return the one that it created before.

        None is returned if a newer upload has overtaken it. The batch that this one replaces
        becomes its `predecessor`.
        """
        key = drop_key(batch.source.bucket, batch.outputs)
        while True:
            newest = yield from self.get(key)
            if newest and (known_id := known_batch(newest, batch, arrival)):
                return (yield from self.get_batch(known_id))
            if newest and is_overtaken(newest, batch, arrival):
                return None
            older_id = newest["batch_id"] if newest else None
            older = (yield from self.get_batch(older_id)) if older_id else None
            if older is not None and older.is_terminal and older.final is None:
                # It has published nothing, so the batch that it replaced counts.
                older_id = older.predecessor
            follower = replace(batch, predecessor=older_id)
            still = condition("batch_id = :known", {":known": newest["batch_id"]}) if newest else {}
            newest_put = {
                "Put": {
                    "TableName": self.name,
                    "Item": to_item(drop_item(batch, arrival)),
                    **(still or nothing_there()),
                }
            }
            try:
                yield self.transact(*self._creation(follower), newest_put)
            except ConditionFailed:
                # An event that S3 repeats may be neither the newest nor overtaken in S3's order.
                made = yield from self.get_batch(batch.id)
                if made is not None:
                    return made
                continue
            return follower

    def move_batch(
        self,
        batch_id: str,
        status: Status,
        now: int,
        *,
        source: Status | None = None,
        lock_owner: str | None = None,
        **changes: object,
    ) -> Operation[MoveResult]:
        """Move a batch to a status and set `changes`, if its present status allows that.

        With `source` it is moved from that status only. With `lock_owner` it is moved only if
        no other run has acquired its lock, which the move releases. If it already has the status,
        nothing is changed and `is_there` is True.
        """
        allowed, names = _status_in(sources_of(status) if source is None else (source,))
        fields = {"status": str(status), f"{status}_at": now, **changes}
        released: tuple[str, ...] = ()
        if lock_owner is not None:
            allowed, names = f"{allowed} AND #turn = :owner", {**names, ":owner": lock_owner}
            released = ("turn",)
        batch, _ = yield from self._set_if(batch_id, fields, allowed, names, removed=released)
        return MoveResult(batch, batch is not None and batch.status is status)

    def change_batch(
        self, batch_id: str, expected: Status, /, **changes: object
    ) -> Operation[Batch | None]:
        """Set fields of a batch if it has the expected status; otherwise return None."""
        batch, is_set = yield from self._set_if(
            batch_id, changes, "#status = :expected", {":expected": str(expected)}
        )
        return batch if is_set else None

    def note_announced(
        self, batch: Batch, others: Sequence[Mapping[str, Any]] = ()
    ) -> Operation[bool]:
        """Record that the batch's status was announced; True for one of concurrent callers.

        It is True for none if the reply to the first was lost, or the batch has moved on. The
        `others` are written together with the record or not at all.
        """
        change = expression(
            {"announced": str(batch.status)},
            condition="#status = :expected AND"
            " (attribute_not_exists(#announced) OR #announced <> :expected)",
            values={":expected": str(batch.status)},
        )
        update = {"TableName": self.name, "Key": to_item(batch_key(batch.id)), **change}
        try:
            if others:
                yield self.transact({"Update": update}, *others)
            else:
                yield Call("dynamodb", "update_item", update)
        except ConditionFailed:
            return False
        return True

    def change_webhook(self, batch: Batch, **changes: object) -> Operation[Batch | None]:
        """Set fields of a batch whose webhook waits for its next try.

        Returns None if another run has begun that try since `batch` was read, or none is due.
        """
        changed, is_set = yield from self._set_if(
            batch.id,
            changes,
            "#webhook_delivery = :pending AND #webhook_tries = :tries",
            {":pending": "pending", ":tries": batch.webhook_tries},
        )
        return changed if is_set else None

    def set_once(self, batch_id: str, field: str, value: object) -> Operation[Any]:
        """Set a field that has no value yet; return the value that it has then.

        None is returned if there is no batch with this ID.
        """
        try:
            yield from self.update(
                batch_key(batch_id),
                {field: value},
                f"attribute_exists(pk) AND attribute_not_exists(#{field})",
                {},
            )
        except ConditionFailed as exc:
            return (exc.item or {}).get(field)
        return value

    def choose_end(self, batch_id: str, status: Status, now: int) -> Operation[Batch | None]:
        """Set the end time of a batch if its status leads to `status` and none is set yet.

        Returns the current batch, or None if there is none with this ID.
        """
        allowed, names = _status_in(sources_of(status))
        batch, _ = yield from self._set_if(
            batch_id,
            {"ended_at": now},
            f"attribute_not_exists(#ended_at) AND {allowed}",
            names,
        )
        return batch

    def acquire_lock(
        self, batch_id: str, owner: str, *, now: float, until: float
    ) -> Operation[LockAttempt]:
        """Acquire the lock on a batch, unless another run holds it."""
        batch, is_set = yield from self._set_if(
            batch_id,
            {"turn": owner, "turn_until": until},
            "attribute_exists(pk) AND (attribute_not_exists(#turn) OR #turn = :owner"
            " OR #turn_until < :now)",
            {":owner": owner, ":now": now},
        )
        return LockAttempt(batch, is_set)

    def renew_lock(self, batch_id: str, owner: str, *, until: float) -> Operation[Batch | None]:
        """Renew the lock and return the current batch.

        Returns None if another run has held the lock since, even if it is free again.
        """
        batch, is_set = yield from self._set_if(
            batch_id, {"turn_until": until}, "#turn = :owner", {":owner": owner}
        )
        return batch if is_set else None

    def release_lock(self, batch_id: str, owner: str) -> Operation[Batch | None]:
        """Release the lock unless another run holds it by now; return the current batch.

        `turn_until` is unchanged.
        """
        batch, _ = yield from self._set_if(
            batch_id, {}, "#turn = :owner", {":owner": owner}, removed=("turn",)
        )
        return batch

    def _set_if(
        self,
        batch_id: str,
        fields: Mapping[str, object],
        required: str,
        values: Mapping[str, object],
        *,
        removed: Sequence[str] = (),
    ) -> Operation[tuple[Batch | None, bool]]:
        """Change a batch under a condition.

        Returns the current batch (None if there is none with this ID) and whether it was changed.
        """
        try:
            found = yield from self.update(
                batch_key(batch_id), fields, required, values, removed=removed
            )
        except ConditionFailed as exc:
            return load(Batch, exc.item) if exc.item else None, False
        return load(Batch, found), True

    def newest_drop(self, bucket: str, outputs: Outputs) -> Operation[str | None]:
        """Return the ID of the batch that the newest upload with such results created, or None."""
        fields = yield from self.get(drop_key(bucket, outputs))
        return str(fields["batch_id"]) if fields else None

    def newest_drops(
        self, bucket: str, outputs: Iterable[Outputs]
    ) -> Operation[dict[str, dict[str, Any]]]:
        """Return the records of the newest uploads with such results, by `results_name`.

        The read is eventually consistent.
        """
        keys = {results_name(each): drop_key(bucket, each) for each in outputs}
        found = yield from self.get_many(list(keys.values()))
        names = {str(key["pk"]): name for name, key in keys.items()}
        return {names[fields["pk"]]: fields for fields in found}

    def note_erasing(self, batch: Batch, now: int) -> Operation[Batch]:
        """Mark a batch as being erased, once, and return it as it is then.

        Until it is buried it is in the list of active batches, under a separate name.
        Only a batch that has ended, and whose webhook is not pending, can be erased.
        """
        ended, names = _status_in(TERMINAL)
        no_webhook = "(attribute_not_exists(#webhook_delivery) OR #webhook_delivery <> :pending)"
        change = expression(
            {"erasing_at": now},
            condition=f"{ended} AND {no_webhook} AND attribute_not_exists(#erasing_at)",
            values={**names, ":pending": "pending"},
        )
        listed = to_item({"pk": ACTIVE, "sk": erasing_name(batch)})
        try:
            yield self.transact(
                {"Update": {"TableName": self.name, "Key": to_item(batch_key(batch.id)), **change}},
                {"Put": {"TableName": self.name, "Item": listed}},
            )
        except ConditionFailed:
            return (yield from self.get_batch(batch.id)) or batch
        return replace(batch, erasing_at=now)

    def page_of_items(self, batch: Batch, limit: int) -> Operation[list[Mapping[str, Any]]]:
        """Return keys of items that belong to a batch, except its own item, at most `limit`."""
        own = batch_key(batch.id)
        arguments: dict[str, Any] = {
            "TableName": self.name,
            "KeyConditionExpression": "pk = :pk",
            "ExpressionAttributeValues": to_item({":pk": own["pk"]}),
            "ProjectionExpression": "pk, sk",
            "ConsistentRead": True,
            "Limit": limit + 1,
        }
        response = yield Call("dynamodb", "query", arguments)
        keys = (to_item(from_item(key)) for key in response["Items"])
        return [key for key in keys if key != to_item(own)]

    def delete_item(self, key: Mapping[str, Any]) -> Operation[None]:
        """Delete an item by its key in DynamoDB's format."""
        yield Call("dynamodb", "delete_item", {"TableName": self.name, "Key": key})

    def bury(self, batch: Batch) -> Operation[None]:
        """Replace a batch by its tombstone, and forget the name of its upload.

        Raises ConditionFailed if its end is not announced, or its lines are still counted: they
        would be announced and counted again.
        """
        if is_drop(batch.outputs):
            yield from self._forget_drop(batch)
        listed = {"tenant": batch.tenant, "created_id": creation_key(batch)}
        item = batch_key(batch.id) | dump(batch.tombstone) | listed
        over = condition(
            "#status = :status AND #announced = :status AND attribute_exists(#erasing_at)"
            " AND attribute_not_exists(#queued_lines) AND attribute_not_exists(#erased_at)",
            {":status": str(batch.status)},
        )
        put = {"TableName": self.name, "Item": to_item(item), **over}
        try:
            yield Call("dynamodb", "put_item", put)
        except ConditionFailed:
            there = yield from self.get_batch(batch.id)
            if there is None or there.erased_at is None:
                raise
        yield from self.forget_active(erasing_name(batch))

    def _forget_drop(self, batch: Batch) -> Operation[None]:
        """Forget the name of a batch's upload, unless a newer one has it."""
        key = to_item(drop_key(batch.source.bucket, batch.outputs))
        own = condition("batch_id = :id", {":id": batch.id})
        try:
            yield Call("dynamodb", "delete_item", {"TableName": self.name, "Key": key, **own})
        except ConditionFailed:
            return

    def list_batches(
        self, tenant: str, *, limit: int, after: Batch | None = None
    ) -> Operation[tuple[list[Batch], bool]]:
        """Return a tenant's batches, newest first and older than `after`, and whether more follow.

        The index is eventually consistent.
        """
        before = _LAST_BATCH if after is None else creation_key(after)
        arguments: dict[str, Any] = {
            "TableName": self.name,
            "IndexName": TENANT_INDEX,
            "KeyConditionExpression": "tenant = :tenant AND created_id < :after",
            "ExpressionAttributeValues": to_item({":tenant": tenant, ":after": before}),
            "ScanIndexForward": False,
            "Limit": limit + 1,
        }
        found: list[Batch] = []
        while len(found) <= limit:
            response = yield Call("dynamodb", "query", arguments)
            found += [load(Batch, fields) for fields in present(response["Items"])]
            last = response.get("LastEvaluatedKey")
            if not last:
                break
            arguments["ExclusiveStartKey"] = last
        return found[:limit], len(found) > limit

    def page_of_active(
        self, after: str | None = None, limit: int | None = None
    ) -> Operation[tuple[list[str], str | None]]:
        """Return names of batches that are not terminal and announced, or not erased yet.

        They follow the name `after`, which need not exist any more. The second item is the name
        that the next page follows, None after the last page.
        """
        arguments = {
            "TableName": self.name,
            "KeyConditionExpression": "pk = :pk",
            "ExpressionAttributeValues": to_item({":pk": ACTIVE}),
            "ProjectionExpression": "sk",
            "ConsistentRead": True,
            **({"ExclusiveStartKey": to_item({"pk": ACTIVE, "sk": after})} if after else {}),
            **({"Limit": limit} if limit else {}),
        }
        response = yield Call("dynamodb", "query", arguments)
        names = [str(item["sk"]["S"]) for item in response["Items"]]
        last = response.get("LastEvaluatedKey")
        return names, str(last["sk"]["S"]) if last else None

    def forget_active(self, name: str) -> Operation[None]:
        """Remove a batch from the list of active ones, under this name."""
        key = to_item({"pk": ACTIVE, "sk": name})
        yield Call("dynamodb", "delete_item", {"TableName": self.name, "Key": key})

    def put_place(self, batch: Batch) -> Operation[None]:
        """Store the place of an active batch in the order of its tenant's batches."""
        change = expression({"place": _place(batch)}, condition="attribute_exists(pk)")
        key = to_item(_active_key(batch))
        yield Call("dynamodb", "update_item", {"TableName": self.name, "Key": key, **change})

    def rename_active(self, batch: Batch, name: str) -> Operation[None]:
        """Rename an active batch to the name by which its tenant's list finds it."""
        item = _active_key(batch) | {"place": _place(batch)}
        yield self.transact(
            {"Put": {"TableName": self.name, "Item": to_item(item)}},
            {"Delete": {"TableName": self.name, "Key": to_item({"pk": ACTIVE, "sk": name})}},
        )

    def _creation(self, batch: Batch) -> tuple[dict[str, Any], ...]:
        listed = {"tenant": batch.tenant, "created_id": creation_key(batch)}
        meta = {
            "TableName": self.name,
            "Item": to_item(batch_key(batch.id) | dump(batch) | listed),
            **nothing_there(),
        }
        active = {
            "TableName": self.name,
            "Item": to_item(_active_key(batch) | {"place": _place(batch)}),
        }
        return {"Put": meta}, {"Put": active}


def _status_in(statuses: Iterable[Status]) -> tuple[str, dict[str, object]]:
    """Return the condition that a batch has one of these statuses, and its values."""
    names: dict[str, object] = {
        f":from{number}": str(status) for number, status in enumerate(statuses)
    }
    return f"#status IN ({', '.join(names)})", names


def _active_key(batch: Batch) -> dict[str, object]:
    return {"pk": ACTIVE, "sk": active_name(batch)}


def _place(batch: Batch) -> list[int]:
    """Return the fields of a `BatchPlace`."""
    return [batch.priority, batch.expires_at, batch.created_at]


def active_name(batch: Batch) -> str:
    """Return the name of a batch in the list of active ones; a tenant's share a prefix."""
    return f"{batch.tenant}#{batch.id}"


def erasing_name(batch: Batch) -> str:
    """Return the name of a batch being erased in the list of active ones, outside all tenants."""
    return f"#erasing#{batch.id}"


def id_of_active(name: str) -> str:
    """Return the batch's ID in such a name, also in one from an earlier version."""
    return name.rpartition("#")[2]
