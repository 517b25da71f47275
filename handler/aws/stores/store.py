"""DynamoDB table: reads and writes of items, for operations on batches, shards and keys.

An item whose `expires` (Unix seconds) has passed counts as absent: DynamoDB deletes it later,
perhaps after days. A new item in its place must not collide with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import AwsError
from ..calls import RETRY_DELAYS_SECONDS, Call, Operation
from ..items import from_item, to_item, to_value

META = "META"
_MAX_KEYS = 100  # per call


@dataclass(frozen=True, slots=True)
class Store:
    """Creates operations on the items of one table; keys are `pk` and `sk`."""

    name: str

    def get(self, key: Mapping[str, object]) -> Operation[dict[str, Any] | None]:
        """Return the current item, or None, also if it has expired."""
        response = yield Call(
            "dynamodb",
            "get_item",
            {"TableName": self.name, "Key": to_item(key), "ConsistentRead": True},
        )
        fields = from_item(response.get("Item") or {})
        return fields if fields and not is_expired(fields) else None

    def get_many(
        self, keys: Sequence[Mapping[str, object]], *, is_consistent: bool = False
    ) -> Operation[list[dict[str, Any]]]:
        """Return the existing ones of these items, unordered.

        The read is eventually consistent unless `is_consistent`, which costs twice as much.
        Raises AwsError if replies repeatedly leave out everything.
        """
        wanted = [to_item(key) for key in keys]
        consistent = {"ConsistentRead": True} if is_consistent else {}
        found: list[dict[str, Any]] = []
        delay_seconds: float | None = 0.0
        delays = iter(RETRY_DELAYS_SECONDS)
        while wanted:
            if delay_seconds is None:
                raise AwsError(f"dynamodb batch_get_item: {len(wanted)} items left out")
            some, wanted = wanted[:_MAX_KEYS], wanted[_MAX_KEYS:]
            request = {"RequestItems": {self.name: {"Keys": some, **consistent}}}
            response = yield Call("dynamodb", "batch_get_item", request, delay_seconds)
            found += present(response["Responses"].get(self.name, ()))
            # Keys that exceeded one reply's size, or the table's present capacity.
            left = (response.get("UnprocessedKeys") or {}).get(self.name, {}).get("Keys", [])
            wanted += left
            if len(left) < len(some):
                delays = iter(RETRY_DELAYS_SECONDS)
            delay_seconds = next(delays, None) if left else 0.0
        return found

    def query(
        self, partition: str, prefix: str, only: Sequence[str] = ()
    ) -> Operation[list[dict[str, Any]]]:
        """Return the items of a partition whose `sk` starts with a prefix, in order of `sk`.

        `only` names the fields to read, by default all.
        """
        names = (*only, "expires") if only else ()
        found: list[dict[str, Any]] = []
        last: Mapping[str, Any] | None = None
        while True:
            items, last = yield from self.query_page(partition, prefix, names, after=last)
            found += present(items)
            if last is None:
                return found

    def query_page(
        self,
        partition: str,
        prefix: str,
        only: Sequence[str] = (),
        *,
        after: Mapping[str, Any] | None = None,
        having: Mapping[str, object] | None = None,
        is_consistent: bool = True,
    ) -> Operation[tuple[list[Mapping[str, Any]], Mapping[str, Any] | None]]:
        """Return a page of raw items, up to a megabyte read, and the key to continue after.

        Expired items are included; `having` names values that fields must have. The key is None
        after the last page.
        """
        wanted = having or {}
        arguments: dict[str, Any] = {
            "TableName": self.name,
            "KeyConditionExpression": "pk = :pk AND begins_with(sk, :prefix)",
            "ExpressionAttributeValues": to_item(
                {":pk": partition, ":prefix": prefix}
                | {f":{name}": value for name, value in wanted.items()}
            ),
            "ConsistentRead": is_consistent,
        }
        if only:
            arguments["ProjectionExpression"] = ", ".join(f"#{name}" for name in only)
        if wanted:
            arguments["FilterExpression"] = " AND ".join(f"#{name} = :{name}" for name in wanted)
        if names := {*only, *wanted}:
            arguments["ExpressionAttributeNames"] = {f"#{name}": name for name in sorted(names)}
        if after is not None:
            arguments["ExclusiveStartKey"] = after
        response = yield Call("dynamodb", "query", arguments)
        return response["Items"], response.get("LastEvaluatedKey") or None

    def update(
        self,
        key: Mapping[str, object],
        fields: Mapping[str, object],
        condition: str | None = None,
        values: Mapping[str, object] | None = None,
        *,
        increments: Mapping[str, int] | None = None,
        added: Mapping[str, float] | None = None,
        removed: Sequence[str] = (),
    ) -> Operation[dict[str, Any]]:
        """Update an item under a condition and return it; ConditionFailed has the current item.

        `added` fields start at zero; incremented ones must exist.
        """
        returned_item = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"} if condition else {}
        arguments = {
            "TableName": self.name,
            "Key": to_item(key),
            "ReturnValues": "ALL_NEW",
            **returned_item,
            **expression(
                fields,
                increments=increments or {},
                added=added or {},
                removed=removed,
                condition=condition,
                values=values,
            ),
        }
        response = yield Call("dynamodb", "update_item", arguments)
        return from_item(response["Attributes"])

    def transact(self, *writes: Mapping[str, Any]) -> Call:
        """Return the call that does all the writes or none of them."""
        return Call("dynamodb", "transact_write_items", {"TransactItems": list(writes)})


def is_expired(fields: Mapping[str, Any]) -> bool:
    """Return whether an item has expired."""
    return bool(fields.get("expires", math.inf) <= time.time())


def present(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields of the items that have not expired."""
    found = map(from_item, items)
    return [fields for fields in found if not is_expired(fields)]


def condition(words: str, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a condition on a put; `#name` means the attribute of that name."""
    arguments: dict[str, Any] = {"ConditionExpression": words}
    if names := {f"#{name}": name for name in _names_in(words)}:
        arguments["ExpressionAttributeNames"] = names
    if values:
        arguments["ExpressionAttributeValues"] = to_item(values)
    return arguments


def nothing_there() -> dict[str, Any]:
    """Return the condition of a put that may replace only an expired item."""
    return condition("attribute_not_exists(pk) OR #expires <= :now", {":now": int(time.time())})


def _names_in(words: str) -> Iterator[str]:
    for word in words.replace("(", " ").replace(")", " ").split():
        if word.startswith("#"):
            yield word[1:]


def expression(
    fields: Mapping[str, object],
    *,
    increments: Mapping[str, int] | None = None,
    added: Mapping[str, float] | None = None,
    removed: Sequence[str] = (),
    initial: Mapping[str, object] | None = None,
    condition: str | None = None,
    values: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return the arguments of an update; `#name` in a condition is the attribute of that name.

    A field that is None is removed. `increments` add to numbers that exist, `added` also to those
    that do not. `initial` fields are set only if they do not exist.
    """
    increments, added, initial = increments or {}, added or {}, initial or {}
    sets = {name: value for name, value in fields.items() if value is not None}
    gone = [*removed, *(name for name, value in fields.items() if value is None)]
    clauses = []
    assignments = [f"#{name} = :set_{name}" for name in sets]
    assignments += [f"#{name} = #{name} + :add_{name}" for name in increments]
    assignments += [f"#{name} = if_not_exists(#{name}, :set_{name})" for name in initial]
    if assignments:
        clauses.append(f"SET {', '.join(assignments)}")
    if gone:
        clauses.append(f"REMOVE {', '.join(f'#{name}' for name in gone)}")
    if added:
        clauses.append(f"ADD {', '.join(f'#{name} :plus_{name}' for name in added)}")
    sets = {**sets, **initial}
    names = {*sets, *increments, *added, *gone, *_names_in(condition or "")}
    placed = {f":set_{name}": to_value(value) for name, value in sets.items()}
    placed |= {f":add_{name}": to_value(value) for name, value in increments.items()}
    placed |= {f":plus_{name}": to_value(value) for name, value in added.items()}
    placed |= {name: to_value(value) for name, value in (values or {}).items()}
    arguments: dict[str, Any] = {
        "UpdateExpression": " ".join(clauses),
        "ExpressionAttributeNames": {f"#{name}": name for name in sorted(names)},
    }
    if placed:
        arguments["ExpressionAttributeValues"] = placed
    if condition:
        arguments["ConditionExpression"] = condition
    return arguments
