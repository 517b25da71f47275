"""Workers as processes of one machine: the requested and the actual state of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import ConditionFailed
from ..calls import Call, Operation
from ..items import dump, load, to_item
from .store import Store, condition

_PREFIX = "process-"
ProcessState = Literal["asked", "running", "stopping"]


@dataclass(frozen=True, slots=True)
class Process:
    """A worker that is requested, running or stopping; `at` (Unix seconds) is when it became so."""

    id: str
    release: str
    state: ProcessState
    at: int


class ProcessStore(Store):
    """Creates operations between the launcher and the machine that runs the processes."""

    __slots__ = ()

    def ask(self, model: str, process: Process) -> Operation[None]:
        """Request a process; an existing one with this ID is unchanged."""
        arguments = {
            "TableName": self.name,
            "Item": to_item(_key(model, process.id) | dump(process)),
            **condition("attribute_not_exists(pk)", {}),
        }
        try:
            yield Call("dynamodb", "put_item", arguments)
        except ConditionFailed:
            return

    def list_processes(self, model: str) -> Operation[list[Process]]:
        """Return the processes that have not ended, in the order of their IDs."""
        found = yield from self.query(_partition(model), _PREFIX)
        return [load(Process, fields) for fields in found]

    def tell(self, model: str, process_id: str, state: ProcessState, now: int) -> Operation[bool]:
        """Record the requested or the actual state of a process; False if it has ended."""
        try:
            yield from self.update(
                _key(model, process_id), {"state": state, "at": now}, "attribute_exists(pk)"
            )
        except ConditionFailed:
            return False
        return True

    def forget(self, model: str, process_id: str) -> Operation[None]:
        """Delete a process that has ended."""
        key = to_item(_key(model, process_id))
        yield Call("dynamodb", "delete_item", {"TableName": self.name, "Key": key})


def process_id(number: int) -> str:
    """Return the ID of the process with this number."""
    return f"{_PREFIX}{number:011}"


def _partition(model: str) -> str:
    return f"WORKERS#{model}"


def _key(model: str, process_id: str) -> dict[str, object]:
    return {"pk": _partition(model), "sk": process_id}
