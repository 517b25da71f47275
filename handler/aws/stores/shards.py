"""Operations on shards: claim, renew and commit, each by the shard's owner only.

One item contains a shard's plan and result; it alone decides whether the shard is done and whose
commit counts. Another item contains what changes while the shard runs, from its first claim on.
A claim grants a lease; its fencing token, which grows with every claim, invalidates older owners.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from tidemill.batch.model import Shard, ShardStatus
from tidemill.batch.progress_counts import Progress

from ...errors import ConditionFailed, LeaseLost
from ..calls import Call, Operation
from ..items import dump, from_item, load, to_item
from .live import (
    LiveStore,
    count_key,
    counting,
    live_fields,
    live_item,
    live_key,
    live_name,
    nonzero_counts,
    with_live,
)
from .store import META, condition, expression, nothing_there, present

_SHARD = "SHARD#"
_LAST_SHARD = 9_999_999


class ShardStore(LiveStore):
    """Creates operations on the shards of batches in one DynamoDB table."""

    __slots__ = ()

    def put_shard(self, shard: Shard) -> Operation[None]:
        """Record a planned shard; an existing one is unchanged.

        An unclaimed shard with other lines is replaced: an earlier release cut it.
        """
        arguments = {
            "TableName": self.name,
            "Item": to_item(_shard_key(shard) | _planned(shard)),
            **condition(
                "attribute_not_exists(pk) OR #expires <= :now "
                "OR (#fence = :none AND (#start <> :start OR #end <> :end))",
                {":now": int(time.time()), ":none": 0, ":start": shard.start, ":end": shard.end},
            ),
        }
        try:
            yield Call("dynamodb", "put_item", arguments)
        except ConditionFailed:
            return

    def forget_shards(self, batch_id: str, first: int) -> Operation[None]:
        """Delete the shards from number `first` on: an earlier version cut more."""
        after: int | None = first
        while after is not None:
            shards, after = yield from self.list_shards_page(batch_id, after)
            for shard in shards:
                key = {"TableName": self.name, "Key": to_item(_shard_key(shard))}
                yield Call("dynamodb", "delete_item", key)

    def get_shard(self, batch_id: str, number: int) -> Operation[Shard | None]:
        """Return the shard as it is now, or None."""
        shard, _ = yield from self._read(batch_id, number)
        return shard

    def list_shards(self, batch_id: str) -> Operation[list[Shard]]:
        """Return all shards of a batch in order."""
        found: list[Shard] = []
        first: int | None = 0
        while first is not None:
            page, first = yield from self.list_shards_page(batch_id, first)
            found += page
        return found

    def list_shards_page(
        self, batch_id: str, first: int = 0, limit: int | None = None
    ) -> Operation[tuple[list[Shard], int | None]]:
        """Return shards from number `first` on, as many as one reply contains.

        They show the current state, also of running shards. The second item is the number at which
        the next page begins, None after the last. `limit` bounds their number.
        """
        fields, last = yield from self._between(
            batch_id, _shard_name(first), _shard_name(_LAST_SHARD), limit
        )
        pending = [item["number"] for item in fields if item["status"] == ShardStatus.PENDING]
        live: list[dict[str, Any]] = []
        after = live_name(pending[0]) if pending else None
        while after is not None:
            found, after = yield from self._between(batch_id, after, live_name(pending[-1]))
            live += found
        by_number = {_number_in(item["sk"]): item for item in live}
        shards = [with_live(item, by_number.get(item["number"])) for item in fields]
        return shards, _number_in(last) + 1 if last else None

    def list_waiting(
        self, batch_id: str, others: AbstractSet[int], limit: int
    ) -> Operation[list[int]]:
        """Return the numbers of the first shards that are neither done nor excluded."""
        found: list[int] = []
        after = None
        while True:
            items, after = yield from self.query_page(
                f"BATCH#{batch_id}",
                _SHARD,
                ("number",),
                after=after,
                having={"status": str(ShardStatus.PENDING)},
            )
            numbers = (int(from_item(item)["number"]) for item in items)
            found += [number for number in numbers if number not in others]
            if after is None or len(found) >= limit:
                return found[:limit]

    def list_some_pending(self, batch_id: str, start: int) -> Operation[list[int]]:
        """Return numbers of shards that are not done, from two pages, which may be a moment old.

        They begin at number `start`, and continue with the first shard after the last.
        """
        found: list[int] = []
        first, last = _shard_name(start), _shard_name(_LAST_SHARD)
        for _ in range(2):
            names, end = yield from self._between(batch_id, first, last, only_pending=True)
            found += [_number_in(item["sk"]) for item in names]
            if end is None and not start:
                break
            if end is None:
                first, last = _shard_name(0), _shard_name(start - 1)
            else:
                first = _shard_name(_number_in(end) + 1)
        return found

    def claim(
        self,
        batch_id: str,
        number: int,
        *,
        owner: str,
        now: float,
        lease_seconds: float,
        steal: bool = False,
        is_escalated: bool | None = None,
    ) -> Operation[Shard]:
        """Claim the right to run a shard: a new fencing token, and a lease with an end.

        `owner` is unique to this claim. `steal` ignores the lease of another owner. Raises
        ConditionFailed, whose item is the shard, if it is done, leased, missing, or waits for
        another model than `is_escalated` says, unless that is None.
        """
        while True:
            shard, live = yield from self._read(batch_id, number)
            if shard is None:
                raise ConditionFailed(f"batch {batch_id} has no shard {number}")
            if shard.owner == owner:
                return shard
            is_others = is_escalated not in {None, shard.is_escalated}
            is_held = shard.is_leased(now) and not steal
            if shard.status is ShardStatus.DONE or is_others or is_held:
                raise ConditionFailed(f"shard {number} of {batch_id}", item=dump(shard))
            mine = replace(
                shard,
                owner=owner,
                lease_until=now + lease_seconds,
                fence=shard.fence + 1,
                attempts=shard.attempts + 1,
            )
            # A concurrent writer may have changed either since it was read.
            same = condition("#state = :seen", {":seen": live["state"]}) if live else None
            put = {
                "TableName": self.name,
                "Item": to_item(live_item(mine)),
                **(same or nothing_there()),
            }
            try:
                yield self.transact(
                    self._update_pending(shard, {"fence": mine.fence}), {"Put": put}
                )
            except ConditionFailed:
                continue
            return mine

    def renew(
        self, shard: Shard, *, lease_until: float, progress: Progress, attempts: int
    ) -> Operation[None]:
        """Renew a lease and record the progress; raises LeaseLost if it has another owner."""
        kept = replace(shard, lease_until=lease_until, progress=progress, attempts=attempts)
        try:
            yield from self._update_own(shard, {"state": live_fields(kept)["state"]})
        except ConditionFailed as exc:
            raise LeaseLost(f"shard {shard.number} of {shard.batch_id}") from exc

    def release(
        self,
        shard: Shard,
        *,
        progress: Progress,
        suspects: Sequence[Sequence[int]],
        quarantined: Sequence[int],
        attempts: int,
        is_escalated: bool = False,
    ) -> Operation[None]:
        """Release a shard, with the state of its lines; raises LeaseLost as `renew` does.

        A shard that was already released is unchanged: only this owner can have released it. One
        that `is_escalated` waits for the batch's second model from then on.
        """
        free = replace(
            shard,
            owner=None,
            lease_until=0.0,
            progress=progress,
            suspects=tuple(map(tuple, suspects)),
            quarantined=tuple(quarantined),
            attempts=attempts,
            is_escalated=is_escalated or shard.is_escalated,
        )
        fields = live_fields(free)
        del fields["abandoned"]
        try:
            yield from self._update_own(shard, fields)
        except ConditionFailed as exc:
            now = yield from self.get_shard(shard.batch_id, shard.number)
            is_free = now is not None and now.status is ShardStatus.PENDING and now.owner is None
            if now is None or not is_free or now.fence != shard.fence:
                raise LeaseLost(f"shard {shard.number} of {shard.batch_id}") from exc

    def count_escalated(self, shard: Shard, progress: Progress) -> Operation[bool]:
        """Record the progress of a listed shard that waits for the second model.

        Returns False if a worker holds it or its state has changed.
        """
        current, live = yield from self._read(shard.batch_id, shard.number)
        if current is None or live is None or current.owner is not None:
            return False
        if _version(current) != _version(shard):
            return False
        counted = live_fields(replace(current, progress=progress))["state"]
        try:
            yield from self.update(
                live_key(shard.batch_id, shard.number),
                {"state": counted},
                "#state = :seen",
                {":seen": live["state"]},
            )
        except ConditionFailed:
            return False
        return True

    def abandon(self, batch_id: str, number: int, reason: str) -> Operation[bool]:
        """Give up the lines without a row of a started shard; True for the first caller only.

        A shard that is done, already given up, or never begun is unchanged.
        """
        try:
            yield from self.update(
                live_key(batch_id, number),
                {"abandoned": reason},
                "attribute_exists(pk) AND attribute_not_exists(#abandoned)",
                {},
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
        """Commit the segments under the shard's fencing token; add it to the batch's totals.

        Both happen or none. Raises LeaseLost if the shard has another owner.
        """
        done = {
            "status": str(ShardStatus.DONE),
            "progress": nonzero_counts(progress),
            "output_sizes": output_sizes,
            "error_sizes": error_sizes,
            "suspects": shard.suspects or None,
            "quarantined": shard.quarantined or None,
            "abandoned": shard.abandoned,
            # An earlier version stored them here.
            **dict.fromkeys(("owner", "lease_until", "attempts")),
        }
        live = {"TableName": self.name, "Key": to_item(live_key(shard.batch_id, shard.number))}
        counts = {
            "TableName": self.name,
            "Key": to_item(count_key(shard)),
            **counting(shard, progress),
        }
        try:
            yield self.transact(
                self._update_pending(shard, done), {"Delete": live}, {"Update": counts}
            )
        except ConditionFailed as exc:
            now = yield from self.get_shard(shard.batch_id, shard.number)
            if now is None or now.status is not ShardStatus.DONE or now.fence != shard.fence:
                raise LeaseLost(f"shard {shard.number} of {shard.batch_id}") from exc

    def _between(
        self,
        batch_id: str,
        first: str,
        last: str,
        limit: int | None = None,
        *,
        only_pending: bool = False,
    ) -> Operation[tuple[list[dict[str, Any]], str | None]]:
        """Return a page of a batch's items, and the last one's name if more follow.

        With `only_pending` they are the names of shards that are not done, maybe a moment old.
        """
        bounds = {":pk": f"BATCH#{batch_id}", ":first": first, ":last": last}
        read: dict[str, Any] = {"ConsistentRead": True}
        if only_pending:
            bounds[":pending"] = str(ShardStatus.PENDING)
            read = {
                "FilterExpression": "#status = :pending",
                "ProjectionExpression": "sk",
                "ExpressionAttributeNames": {"#status": "status"},
            }
        response = yield Call(
            "dynamodb",
            "query",
            {
                "TableName": self.name,
                "KeyConditionExpression": "pk = :pk AND sk BETWEEN :first AND :last",
                "ExpressionAttributeValues": to_item(bounds),
                **read,
                **({} if limit is None else {"Limit": limit}),
            },
        )
        end = response.get("LastEvaluatedKey")
        return present(response["Items"]), from_item(end)["sk"] if end else None

    def _read(
        self, batch_id: str, number: int
    ) -> Operation[tuple[Shard | None, dict[str, Any] | None]]:
        """Return the current shard, and its live item."""
        fields = yield from self.get(_shard_key_of(batch_id, number))
        if fields is None or fields["status"] == ShardStatus.DONE:
            return (load(Shard, fields) if fields else None), None
        live = yield from self.get(live_key(batch_id, number))
        return with_live(fields, live), live

    def _update_pending(self, shard: Shard, fields: Mapping[str, object]) -> dict[str, Any]:
        """Return the update of a shard, on condition that it was not claimed since it was read."""
        change = expression(
            fields,
            condition="#status = :pending AND #fence = :fence",
            values={":pending": str(ShardStatus.PENDING), ":fence": shard.fence},
        )
        return {"Update": {"TableName": self.name, "Key": to_item(_shard_key(shard)), **change}}

    def _update_own(self, shard: Shard, fields: Mapping[str, object]) -> Operation[None]:
        yield from self.update(
            live_key(shard.batch_id, shard.number),
            fields,
            "#owner = :mine",
            {":mine": shard.owner},
        )


def batch_key(batch_id: str) -> dict[str, object]:
    """Return the key of a batch."""
    return {"pk": f"BATCH#{batch_id}", "sk": META}


def _shard_key(shard: Shard) -> dict[str, object]:
    return _shard_key_of(shard.batch_id, shard.number)


def _shard_key_of(batch_id: str, number: int) -> dict[str, object]:
    return {"pk": f"BATCH#{batch_id}", "sk": _shard_name(number)}


def _shard_name(number: int) -> str:
    return f"{_SHARD}{number:07}"


def _version(shard: Shard) -> tuple[int, int, Progress]:
    """Return the fields that show whether a shard has changed since it was listed."""
    return shard.fence, shard.attempts, shard.progress


def _planned(shard: Shard) -> dict[str, object]:
    """Return the fields of a planned shard that differ from the defaults."""
    usual = dump(Shard("", -1, -1, -1, -1, -1))
    always = {"status": str(shard.status), "fence": shard.fence}
    return {name: value for name, value in dump(shard).items() if value != usual[name]} | always


def _number_in(name: str) -> int:
    return int(name.rpartition("#")[2])
