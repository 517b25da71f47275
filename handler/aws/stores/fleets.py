"""Fleet items in the table: the state, changed by one writer at a time, and the worker rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tidemill.batch.fleet import FleetState, WorkerRate

from ...errors import ConditionFailed
from ..calls import Call, Operation
from ..items import dump, load, to_item
from .store import Store, condition

# The owner of a blocked place; not a worker's name.
_NO_OWNER: Final = "*"


class FleetStore(Store):
    """Creates operations on the stored state of a model's fleet."""

    __slots__ = ()

    def get_state(self, model: str) -> Operation[FleetState]:
        """Return the state of a model's fleet; an empty one if it never had a worker."""
        state, _ = yield from self._read(model)
        return state

    def change(
        self, model: str, change: Callable[[FleetState], FleetState]
    ) -> Operation[FleetState]:
        """Apply `change` to the state, and return the new state.

        After a concurrent write, `change` is called again, so no update is lost.
        """
        while True:
            state, version = yield from self._read(model)
            changed = change(state)
            if changed == state:
                return state
            known = (
                condition("#version = :version", {":version": version})
                if version
                else condition("attribute_not_exists(pk)", {})
            )
            item = _state_key(model) | dump(changed) | {"version": version + 1}
            try:
                yield Call(
                    "dynamodb", "put_item", {"TableName": self.name, "Item": to_item(item), **known}
                )
            except ConditionFailed:
                continue
            return changed

    def note_look(self, model: str, *, now: int, seconds: int) -> Operation[bool]:
        """Record a check of a fleet; False if another process checked it in the last `seconds`."""
        try:
            yield from self.update(
                _look_key(model),
                {"at": now},
                "attribute_not_exists(pk) OR #at <= :before",
                {":before": now - seconds},
            )
        except ConditionFailed:
            return False
        return True

    def get_rate(self, model: str) -> Operation[WorkerRate]:
        """Return the model's latest measured rates, which may be empty."""
        fields = yield from self.get(_pace_key(model))
        return load(WorkerRate, fields) if fields else WorkerRate()

    def put_rate(self, model: str, rate: WorkerRate) -> Operation[None]:
        """Replace the last measurements by those of a worker.

        Zero means not measured: the previous value is retained.
        """
        measured = {name: value for name, value in dump(rate).items() if value}
        yield from self.update(_pace_key(model), measured)

    def get_endpoints(self, model: str) -> Operation[list[str]]:
        """Return the endpoints that the newest worker of a model served; none before the first."""
        fields = yield from self.get(_endpoints_key(model))
        return [*fields["endpoints"]] if fields else []

    def put_endpoints(self, model: str, endpoints: Sequence[str]) -> Operation[None]:
        """Record the endpoints that a worker of a model serves."""
        yield from self.update(_endpoints_key(model), {"endpoints": [*endpoints]})

    def keep_ready(
        self, model: str, num_workers: int, owner: str, *, now: float, until: float
    ) -> Operation[bool]:
        """Return whether an idle worker is one of those that stay: each has a place until a time.

        It keeps its own place, or takes an expired one.
        """
        place = {"owner": owner, "until": int(until)}
        for number in range(num_workers):
            try:
                yield from self.update(
                    _place_key(model, number),
                    place,
                    "attribute_not_exists(pk) OR #owner = :me OR #until < :now",
                    {":me": owner, ":now": int(now)},
                )
            except ConditionFailed:
                continue
            return True
        return False

    def block_ready(self, model: str, num_workers: int, *, until: float) -> Operation[None]:
        """Reserve the places of workers that stay, whatever their owner, until a time."""
        for number in range(num_workers):
            yield from self.update(
                _place_key(model, number), {"owner": _NO_OWNER, "until": int(until)}
            )

    def _read(self, model: str) -> Operation[tuple[FleetState, int]]:
        fields = (yield from self.get(_state_key(model))) or {}
        return load(FleetState, fields), int(fields.get("version", 0))


def _state_key(model: str) -> dict[str, object]:
    return {"pk": f"FLEET#{model}", "sk": "STATE"}


def _look_key(model: str) -> dict[str, object]:
    return {"pk": f"FLEET#{model}", "sk": "LOOK"}


def _place_key(model: str, number: int) -> dict[str, object]:
    return {"pk": f"FLEET#{model}", "sk": f"READY#{number}"}


def _endpoints_key(model: str) -> dict[str, object]:
    return {"pk": f"FLEET#{model}", "sk": "ENDPOINTS"}


def _pace_key(model: str) -> dict[str, object]:
    return {"pk": f"FLEET#{model}", "sk": "PACE"}
