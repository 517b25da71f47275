"""The table's operations: the truth about batches and shards, moved by conditional writes only.

Any write may have happened although its answer was lost, and is then sent again: where that makes
its own condition fail, the operation looks at what is there and takes its own work for success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from handler.aws.calls import Call, Operation
from handler.aws.items import dump, load, to_item
from handler.aws.store import META, Store, condition, expression, nothing_there, present
from handler.batch.model import Batch, Progress, Shard, ShardStatus, Source
from handler.batch.states import Status, sources_of
from handler.errors import ConditionFailed, LeaseLost

TENANT_INDEX = "by_tenant"
ACTIVE = "ACTIVE"
# Sorts behind all digits, with which the entries of batches begin, and before those of files.
_LAST_BATCH = ":"
# SQS keeps a message for 14 days at most: no event of an upload comes later than that.
_EVENTS_END_SECONDS = 15 * 24 * 3600


class Moved(NamedTuple):
    """The batch as it is now, and whether it has the status that was asked for."""

    batch: Batch | None
    is_there: bool


class Table(Store):
    """Makes the operations on batches and shards in one DynamoDB table."""

    __slots__ = ()

    # Batches

    def get_batch(self, batch_id: str) -> Operation[Batch | None]:
        """Return the batch as it is now, or None when there is none of this id."""
        fields = yield from self.get(_batch_key(batch_id))
        return load(Batch, fields) if fields else None

    def create_batch(self, batch: Batch) -> Operation[Batch]:
        """Record a new batch, or return the one that has its id already."""
        try:
            yield self.transact(*self._creation(batch))
        except ConditionFailed:
            existing = yield from self.get_batch(batch.id)
            if existing is None:
                raise
            return existing
        return batch

    def create_drop(self, batch: Batch, sequencer: str) -> Operation[Batch | None]:
        """Record the batch of an upload, or return the one it made before.

        `sequencer` orders the uploads of one key; None is returned for one that a newer upload has
        overtaken. The batch that this one replaces becomes its `predecessor`.
        """
        key = _drop_key(batch.source)
        while True:
            newest = yield from self.get(key)
            if newest and newest["batch_id"] == batch.id:
                return (yield from self.get_batch(batch.id))
            if newest and _rank(newest["sequencer"]) >= _rank(sequencer):
                return None
            older_id = newest["batch_id"] if newest else None
            older = (yield from self.get_batch(older_id)) if older_id else None
            if older is not None and older.is_terminal and older.final is None:
                # It has published nothing, so what counts is the one that it replaced.
                older_id = older.predecessor
            follower = replace(batch, predecessor=older_id)
            known = condition("batch_id = :known", {":known": newest["batch_id"]}) if newest else {}
            fields = {"batch_id": batch.id, "sequencer": sequencer, "expires": _drop_expires(batch)}
            newest_put = {
                "Put": {
                    "TableName": self.name,
                    "Item": to_item(key | fields),
                    **(known or nothing_there()),
                }
            }
            try:
                yield self.transact(*self._creation(follower), newest_put)
            except ConditionFailed:
                continue
            return follower

    def move_batch(
        self,
        batch_id: str,
        status: Status,
        now: int,
        *,
        source: Status | None = None,
        **changes: object,
    ) -> Operation[Moved]:
        """Move a batch to a status and set `changes`, if its present status allows that.

        With `source` it is moved from that status only. When it has the status already nothing is
        changed and `is_there` says so.
        """
        allowed = sources_of(status) if source is None else (source,)
        names = {f":from{number}": str(source) for number, source in enumerate(allowed)}
        fields = {"status": str(status), f"{status}_at": now, **changes}
        try:
            fields = yield from self.update(
                _batch_key(batch_id), fields, f"#status IN ({', '.join(names)})", names
            )
        except ConditionFailed as exc:
            batch = load(Batch, exc.item) if exc.item else None
            return Moved(batch, batch is not None and batch.status is status)
        return Moved(load(Batch, fields), is_there=True)

    def change_batch(
        self, batch_id: str, expected: Status, **changes: object
    ) -> Operation[Batch | None]:
        """Set fields of a batch while it has the expected status; None when it has another."""
        try:
            fields = yield from self.update(
                _batch_key(batch_id), changes, "#status = :expected", {":expected": str(expected)}
            )
        except ConditionFailed:
            return None
        return load(Batch, fields)

    def note_announced(self, batch: Batch) -> Operation[bool]:
        """Note that the batch's status was told; True for one alone of those who tell it.

        For nobody, where the answer to the first was lost, or the batch has moved on.
        """
        try:
            yield from self.update(
                _batch_key(batch.id),
                {"announced": str(batch.status)},
                "#status = :expected AND"
                " (attribute_not_exists(#announced) OR #announced <> :expected)",
                {":expected": str(batch.status)},
            )
        except ConditionFailed:
            return False
        return True

    def change_webhook(self, batch: Batch, **changes: object) -> Operation[Batch | None]:
        """Set fields of a batch whose webhook waits for its next try.

        None when another run has begun that try since `batch` was read, or it waits no more.
        """
        try:
            fields = yield from self.update(
                _batch_key(batch.id),
                changes,
                "#webhook_delivery = :pending AND #webhook_tries = :tries",
                {":pending": "pending", ":tries": batch.webhook_tries},
            )
        except ConditionFailed:
            return None
        return load(Batch, fields)

    def set_once(self, batch_id: str, field: str, value: object) -> Operation[Any]:
        """Set a field that has no value yet; return the one that it has then.

        None is returned when there is no batch of this id.
        """
        try:
            yield from self.update(
                _batch_key(batch_id),
                {field: value},
                f"attribute_exists(pk) AND attribute_not_exists(#{field})",
                {},
            )
        except ConditionFailed as exc:
            return (exc.item or {}).get(field)
        return value

    def take_turn(self, batch_id: str, owner: str, *, now: float, until: float) -> Operation[bool]:
        """Take the turn with a batch; False while another run has it."""
        try:
            yield from self.update(
                _batch_key(batch_id),
                {"turn": owner, "turn_until": until},
                "attribute_exists(pk) AND (attribute_not_exists(#turn) OR #turn = :owner"
                " OR #turn_until < :now)",
                {":owner": owner, ":now": now},
            )
        except ConditionFailed:
            return False
        return True

    def keep_turn(self, batch_id: str, owner: str, *, until: float) -> Operation[bool]:
        """Keep the turn; False when another run has had it since, even if it is free again."""
        try:
            yield from self.update(
                _batch_key(batch_id), {"turn_until": until}, "#turn = :owner", {":owner": owner}
            )
        except ConditionFailed:
            return False
        return True

    def give_turn(self, batch_id: str, owner: str) -> Operation[None]:
        """Give the turn back unless another run has it by now; `turn_until` tells of it still."""
        try:
            yield from self.update(
                _batch_key(batch_id),
                {},
                "#turn = :owner",
                {":owner": owner},
                removed=("turn",),
            )
        except ConditionFailed:
            return

    def newest_drop(self, source: Source) -> Operation[str | None]:
        """Return the id of the batch that the newest upload of a key made, or None."""
        fields = yield from self.get(_drop_key(source))
        return str(fields["batch_id"]) if fields else None

    def list_batches(
        self, tenant: str, *, limit: int, after: Batch | None = None
    ) -> Operation[tuple[list[Batch], bool]]:
        """Return a tenant's batches, newest first and older than `after`, and whether more follow.

        The index that it reads may be a moment behind.
        """
        before = _LAST_BATCH if after is None else _created_id(after)
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

    def list_active(self) -> Operation[list[str]]:
        """Return the ids of the batches that are not terminal and announced yet."""
        fields = yield from self.query(ACTIVE, "BATCH#")
        return [str(item["sk"]).removeprefix("BATCH#") for item in fields]

    def forget_active(self, batch_id: str) -> Operation[None]:
        """Take a batch off the list of active ones."""
        key = to_item(_active_key(batch_id))
        yield Call("dynamodb", "delete_item", {"TableName": self.name, "Key": key})

    # Shards

    def put_shard(self, shard: Shard) -> Operation[None]:
        """Record a planned shard; one that is there already stays as it is."""
        arguments = {
            "TableName": self.name,
            "Item": to_item(_shard_key(shard) | dump(shard)),
            **nothing_there(),
        }
        try:
            yield Call("dynamodb", "put_item", arguments)
        except ConditionFailed:
            return

    def get_shard(self, batch_id: str, number: int) -> Operation[Shard | None]:
        """Return the shard as it is now, or None."""
        fields = yield from self.get(_shard_key_of(batch_id, number))
        return load(Shard, fields) if fields else None

    def list_shards(self, batch_id: str) -> Operation[list[Shard]]:
        """Return all shards of a batch in their order."""
        fields = yield from self.query(f"BATCH#{batch_id}", "SHARD#")
        return [load(Shard, item) for item in fields]

    def sum_progress(self, batch_id: str, now: float) -> Operation[Progress]:
        """Return the sum of the shards' absolute counts: it never falls while a batch runs.

        Rates are summed over those shards that somebody has the right to run now.
        """
        only = ("progress", "owner", "lease_until")
        fields = yield from self.query(f"BATCH#{batch_id}", "SHARD#", only)
        return sum((progress_in(item, now) for item in fields), start=Progress())

    def claim(
        self,
        batch_id: str,
        number: int,
        *,
        owner: str,
        now: float,
        lease_seconds: float,
        steal: bool = False,
    ) -> Operation[Shard]:
        """Take the right to run a shard: a new fence, and a lease that ends after a while.

        `owner` is unique to this claim. With `steal` another's lease counts for nothing. Raises
        ConditionFailed, whose item is the shard, when it is done, leased or not there.
        """
        free = "" if steal else " AND (attribute_not_exists(#owner) OR #lease_until < :now)"
        try:
            fields = yield from self.update(
                _shard_key_of(batch_id, number),
                {"owner": owner, "lease_until": now + lease_seconds},
                f"#status = :pending{free}",
                {":pending": str(ShardStatus.PENDING)} | ({} if steal else {":now": now}),
                increments={"fence": 1, "attempts": 1},
            )
        except ConditionFailed as exc:
            if exc.item and exc.item.get("owner") == owner:
                return load(Shard, exc.item)
            raise
        return load(Shard, fields)

    def renew(
        self, shard: Shard, *, lease_until: float, progress: Progress, attempts: int
    ) -> Operation[None]:
        """Keep a shard and tell how far it is; raises LeaseLost when another owner has it."""
        yield from self._update_own(
            shard,
            {"lease_until": lease_until, "progress": dump(progress), "attempts": attempts},
        )

    def release(
        self,
        shard: Shard,
        *,
        progress: Progress,
        suspects: Sequence[Sequence[int]],
        quarantined: Sequence[int],
        attempts: int,
    ) -> Operation[None]:
        """Give a shard back, with what is known of its lines; LeaseLost as with `renew`.

        Given back already it is left as it is: nobody else can have done that.
        """
        changes = {
            "progress": dump(progress),
            "suspects": suspects,
            "quarantined": quarantined,
            "attempts": attempts,
        }
        try:
            yield from self._update_own(shard, changes, removed=("owner", "lease_until"))
        except LeaseLost:
            now = yield from self.get_shard(shard.batch_id, shard.number)
            is_free = now is not None and now.status is ShardStatus.PENDING and now.owner is None
            if now is None or not is_free or now.fence != shard.fence:
                raise

    def abandon(self, batch_id: str, number: int, reason: str) -> Operation[bool]:
        """Give up the lines of a shard that have no row; True for the first who does.

        A shard that is done or given up already stays as it is.
        """
        try:
            yield from self.update(
                _shard_key_of(batch_id, number),
                {"abandoned": reason},
                "#status = :pending AND attribute_not_exists(#abandoned)",
                {":pending": str(ShardStatus.PENDING)},
            )
        except ConditionFailed:
            return False
        return True

    def commit(
        self,
        shard: Shard,
        *,
        progress: Progress,
        output_sizes: Sequence[int],
        error_sizes: Sequence[int],
    ) -> Operation[None]:
        """Make the segments under the shard's fence its rows, and count it off in its batch.

        Both happen or none. Raises LeaseLost when another owner has the shard.
        """
        fields = {
            "status": str(ShardStatus.DONE),
            "progress": dump(progress),
            "output_sizes": output_sizes,
            "error_sizes": error_sizes,
        }
        own = "#status = :pending AND #fence = :fence"
        values = {":pending": str(ShardStatus.PENDING), ":fence": shard.fence}
        done = {
            "TableName": self.name,
            "Key": to_item(_shard_key(shard)),
            **expression(fields, removed=("owner", "lease_until"), condition=own, values=values),
        }
        counted = {
            "TableName": self.name,
            "Key": to_item(_batch_key(shard.batch_id)),
            **expression({}, increments={"shards_left": -1}),
        }
        try:
            yield self.transact({"Update": done}, {"Update": counted})
        except ConditionFailed as exc:
            now = yield from self.get_shard(shard.batch_id, shard.number)
            if now is None or now.status is not ShardStatus.DONE or now.fence != shard.fence:
                raise LeaseLost(f"shard {shard.number} of {shard.batch_id}") from exc

    # What they share

    def _update_own(
        self, shard: Shard, fields: Mapping[str, object], removed: Sequence[str] = ()
    ) -> Operation[None]:
        try:
            yield from self.update(
                _shard_key(shard),
                fields,
                "#status = :pending AND #fence = :fence AND #owner = :owner",
                {
                    ":pending": str(ShardStatus.PENDING),
                    ":fence": shard.fence,
                    ":owner": shard.owner,
                },
                removed=removed,
            )
        except ConditionFailed as exc:
            raise LeaseLost(f"shard {shard.number} of {shard.batch_id}") from exc

    def _creation(self, batch: Batch) -> tuple[dict[str, Any], ...]:
        listed = {"tenant": batch.tenant, "created_id": _created_id(batch)}
        meta = {
            "TableName": self.name,
            "Item": to_item(_batch_key(batch.id) | dump(batch) | listed),
            **nothing_there(),
        }
        listed_active = _active_key(batch.id) | {"tenant": batch.tenant}
        active = {"TableName": self.name, "Item": to_item(listed_active)}
        return {"Put": meta}, {"Put": active}


def _batch_key(batch_id: str) -> dict[str, object]:
    return {"pk": f"BATCH#{batch_id}", "sk": META}


def _created_id(batch: Batch) -> str:
    return f"{batch.created_at:012}#{batch.id}"


def _drop_key(source: Source) -> dict[str, object]:
    return {"pk": f"DROP#{source.bucket}/{source.key}", "sk": META}


def _drop_expires(batch: Batch) -> int | None:
    """The memory of an upload outlives every event of it, else a late one would run it again."""
    if batch.expires is None:
        return None
    return max(batch.expires, batch.created_at + _EVENTS_END_SECONDS)


def _active_key(batch_id: str) -> dict[str, object]:
    return {"pk": ACTIVE, "sk": f"BATCH#{batch_id}"}


def _shard_key(shard: Shard) -> dict[str, object]:
    return _shard_key_of(shard.batch_id, shard.number)


def _shard_key_of(batch_id: str, number: int) -> dict[str, object]:
    return {"pk": f"BATCH#{batch_id}", "sk": f"SHARD#{number:07}"}


def progress_in(fields: Mapping[str, Any], now: float) -> Progress:
    """Return the progress in the fields of a shard; it has rates while somebody runs the shard."""
    progress = load(Progress, fields["progress"])
    is_leased = fields.get("owner") is not None and fields.get("lease_until", 0.0) >= now
    return progress if is_leased else progress.at_rest


def _rank(sequencer: str) -> str:
    """S3's sequencers are hexadecimal and of unequal length: padded on the right they compare."""
    return sequencer.upper().ljust(64, "0")
