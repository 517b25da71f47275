"""Items of shards in progress, and totals over the finished shards of a batch.

Each live shard has one item, which contains everything that changes while it runs; a few other
items contain the totals of finished shards. Both belong to one life of a batch: items left by an
expired batch of the same name are ignored.

One query from the end reads the live shards first and the totals after them: a shard that is
committed in between is seen twice, never missed. So the totals name the shards added last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from pydantic_core import from_json, to_json

from tidemill.batch.model import Batch, Shard, ShardStatus
from tidemill.batch.progress import LiveShard, ShardProgress
from tidemill.batch.progress_counts import ROW_TIMES, Progress, sum_of

from ..calls import Call, Operation
from ..items import dump, load, to_item
from .store import Store, expression, present

# Several items of counts, so that two concurrent commits rarely meet on one.
_NUM_COUNTS: Final = 8
# Shards named by each such item: more than are added during one read.
_NUM_LAST: Final = 16
# Sorts after the numbers of all live shards.
_LAST_LIVE: Final = "LIVE#:"
# Known fields of a progress: a later version may have more.
_NUM_FIELDS: Final = len(fields(Progress))


class LiveStore(Store):
    """Creates operations that read the progress of batches."""

    __slots__ = ()

    def get_shard_progress(self, batch: Batch) -> Operation[ShardProgress]:
        """Return the progress of a batch's shards: a query per megabyte of live ones, at least one.

        If a hundred are committed in that time, some may be counted twice in this result.
        """
        life, prefix = _life(batch), f"COUNT#{_life(batch)}#"
        bounds = {":pk": f"BATCH#{batch.id}", ":first": prefix, ":last": _LAST_LIVE}
        arguments: dict[str, Any] = {
            "TableName": self.name,
            "KeyConditionExpression": "pk = :pk AND sk BETWEEN :first AND :last",
            "ExpressionAttributeValues": to_item(bounds),
            # The history of the batch is between them.
            "FilterExpression": "attribute_exists(#state) OR attribute_exists(num_shards)",
            "ExpressionAttributeNames": {"#state": "state"},
            "ScanIndexForward": False,
            "ConsistentRead": True,
        }
        live: list[LiveShard] = []
        counts: list[dict[str, Any]] = []
        while True:
            response = yield Call("dynamodb", "query", arguments)
            items = [item for item in response["Items"] if "state" in item]
            # Parsed as one text: thousands of short ones take several times as long.
            states = from_json(f"[{','.join(item['state']['S'] for item in items)}]")
            live += [
                _live_of(state, is_given_up="abandoned" in item, is_escalated="escalated" in item)
                for state, item in zip(states, items, strict=True)
                if state[0] == life
            ]
            # Items of an earlier batch of this name may follow.
            own = (item for item in response["Items"] if item["sk"]["S"].startswith(prefix))
            counts += present(own)
            if not (last := response.get("LastEvaluatedKey")):
                break
            arguments["ExclusiveStartKey"] = last
        added = {item.get(f"last{slot}") for item in counts for slot in range(_NUM_LAST)}
        return ShardProgress(
            sum(item["num_shards"] for item in counts),
            sum_of(load(Progress, item) for item in counts),
            tuple(shard for shard in reversed(live) if shard.number not in added),
        )

    def count_left(self, batch: Batch) -> Operation[int]:
        """Return how many shards of a batch are not done, in one read."""
        partition, prefix = f"BATCH#{batch.id}", f"COUNT#{_life(batch)}#"
        counts = yield from self.query(partition, prefix, ("num_shards",))
        num_done: int = sum(item["num_shards"] for item in counts)
        return batch.shards_left - num_done

    def count_workers(self, batch: Batch) -> Operation[int]:
        """Return how many workers have shards of a batch.

        An owner's name consists of its worker's name, a hyphen, and the number of the claim.
        """
        live = yield from self.query(f"BATCH#{batch.id}", "LIVE#", ("owner",))
        owners = {item["owner"].rpartition("-")[0] for item in live if item.get("owner")}
        return len(owners)


def live_key(batch_id: str, number: int) -> dict[str, object]:
    """Return the key of a shard's live item."""
    return {"pk": f"BATCH#{batch_id}", "sk": live_name(number)}


def live_name(number: int) -> str:
    """Return the sort key of that item."""
    return f"LIVE#{number:07}"


def live_item(shard: Shard) -> dict[str, object]:
    """Return the live item of a shard that has been claimed."""
    return live_key(shard.batch_id, shard.number) | live_fields(shard) | {"expires": shard.expires}


def live_fields(shard: Shard) -> dict[str, object]:
    """Return the live fields of a shard; None for those without a value."""
    about = (_life(shard), shard.number, shard.fence, shard.attempts, shard.lease_until)
    return {
        "state": to_json([*about, *dump(shard.progress).values()]).decode(),
        "owner": shard.owner,
        "suspects": shard.suspects or None,
        "quarantined": shard.quarantined or None,
        "abandoned": shard.abandoned,
        "escalated": shard.is_escalated or None,
    }


def with_live(item: Mapping[str, Any], live: Mapping[str, Any] | None) -> Shard:
    """Return the shard, merged from its item and its live item.

    A shard that an earlier version has claimed contains these fields itself.
    """
    shard = load(Shard, item)
    if live is None or shard.status is ShardStatus.DONE:
        return shard
    fields_of_state = from_json(live["state"])
    state = _live_of(fields_of_state)
    if fields_of_state[0] != _life(shard) or state.fence < shard.fence:
        return shard
    return replace(
        shard,
        owner=live.get("owner"),
        lease_until=state.lease_until,
        fence=state.fence,
        attempts=state.attempts,
        progress=state.progress,
        suspects=tuple(map(tuple, live.get("suspects", ()))),
        quarantined=tuple(live.get("quarantined", ())),
        abandoned=live.get("abandoned", shard.abandoned),
        is_escalated=live.get("escalated", False),
    )


def count_key(shard: Shard) -> dict[str, object]:
    """Return the key of the counts to which a finished shard is added."""
    number = shard.number % _NUM_COUNTS
    return {"pk": f"BATCH#{shard.batch_id}", "sk": f"COUNT#{_life(shard)}#{number}"}


def counting(shard: Shard, progress: Progress) -> dict[str, Any]:
    """Return the arguments of the update that adds a finished shard to its counts.

    The first shard added to them ran one of the first rows, and the last one of the last.
    """
    slot = shard.number // _NUM_COUNTS % _NUM_LAST
    counts = {"num_shards": 1} | nonzero_counts(progress.without_rates)
    times = {name: counts.pop(name) for name in ROW_TIMES if name in counts}
    first, last = ({name: times[name]} if name in times else {} for name in ROW_TIMES)
    return expression(
        {f"last{slot}": shard.number, "expires": shard.expires, **last},
        initial=first,
        added=counts,
    )


def nonzero_counts(progress: Progress) -> dict[str, Any]:
    """Return the fields of a progress that are not zero."""
    return {name: value for name, value in dump(progress).items() if value}


def _life(of: Batch | Shard) -> int:
    """Return what distinguishes two batches of one name: the second starts after the first."""
    return of.expires or 0


def _live_of(
    state: Sequence[Any], *, is_given_up: bool = False, is_escalated: bool = False
) -> LiveShard:
    _, number, fence, attempts, lease_until, *counts = state
    progress = Progress(*counts[:_NUM_FIELDS])
    return LiveShard(number, fence, attempts, lease_until, progress, is_given_up, is_escalated)
