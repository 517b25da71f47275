"""The table's operations on shards: claimed, renewed and committed, each by its owner alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.aws.calls import Call, Operation
from handler.aws.items import dump, from_item, load, to_item
from handler.aws.stores.store import META, Store, expression, nothing_there, present
from handler.batch.model import Progress, Shard, ShardStatus
from handler.errors import ConditionFailed, LeaseLost

_SHARD = "SHARD#"
_LAST_SHARD = 9_999_999


class ShardStore(Store):
    """Makes the operations on the shards of batches in one DynamoDB table."""

    __slots__ = ()

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
        fields = yield from self.query(f"BATCH#{batch_id}", _SHARD)
        return [load(Shard, item) for item in fields]

    def page_of_shards(
        self, batch_id: str, first: int = 0, limit: int | None = None
    ) -> Operation[tuple[list[Shard], int | None]]:
        """Return shards from the one of number `first` on, as many as one answer has.

        They are as they are now, those that are run too. Beside them the number with which the next
        page begins, None behind the last. At most `limit` of them, where that is said.
        """
        bounds = {":first": _shard_name(first), ":last": _shard_name(_LAST_SHARD)}
        response = yield Call(
            "dynamodb",
            "query",
            {
                "TableName": self.name,
                "KeyConditionExpression": "pk = :pk AND sk BETWEEN :first AND :last",
                "ExpressionAttributeValues": to_item({":pk": f"BATCH#{batch_id}"} | bounds),
                "ConsistentRead": True,
                **({} if limit is None else {"Limit": limit}),
            },
        )
        shards = [load(Shard, item) for item in present(response["Items"])]
        last = response.get("LastEvaluatedKey")
        return shards, int(from_item(last)["sk"].removeprefix(_SHARD)) + 1 if last else None

    def sum_progress(self, batch_id: str, now: float) -> Operation[Progress]:
        """Return the sum of the shards' absolute counts: it never falls while a batch runs.

        Rates are summed over those shards that somebody has the right to run now.
        """
        only = ("progress", "owner", "lease_until")
        fields = yield from self.query(f"BATCH#{batch_id}", _SHARD, only)
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
            "Key": to_item(batch_key(shard.batch_id)),
            **expression({}, increments={"shards_left": -1}),
        }
        try:
            yield self.transact({"Update": done}, {"Update": counted})
        except ConditionFailed as exc:
            now = yield from self.get_shard(shard.batch_id, shard.number)
            if now is None or now.status is not ShardStatus.DONE or now.fence != shard.fence:
                raise LeaseLost(f"shard {shard.number} of {shard.batch_id}") from exc

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


def batch_key(batch_id: str) -> dict[str, object]:
    """Return the key of a batch."""
    return {"pk": f"BATCH#{batch_id}", "sk": META}


def _shard_key(shard: Shard) -> dict[str, object]:
    return _shard_key_of(shard.batch_id, shard.number)


def _shard_key_of(batch_id: str, number: int) -> dict[str, object]:
    return {"pk": f"BATCH#{batch_id}", "sk": _shard_name(number)}


def _shard_name(number: int) -> str:
    return f"{_SHARD}{number:07}"


def progress_in(fields: Mapping[str, Any], now: float) -> Progress:
    """Return the progress in the fields of a shard; it has rates while somebody runs the shard."""
    progress = load(Progress, fields["progress"])
    return progress if is_leased(fields, now) else progress.at_rest


def is_leased(fields: Mapping[str, Any], now: float) -> bool:
    """Say whether somebody runs the shard of these fields."""
    return fields.get("owner") is not None and fields.get("lease_until", 0.0) >= now
