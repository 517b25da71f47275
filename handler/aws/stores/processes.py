"""Workers that are processes of one machine: what is wanted of each, and what it is."""

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
    """Makes the operations between who wants processes and who starts and ends them."""

    __slots__ = ()

    def ask(self, model: str, process: Process) -> Operation[None]:
        """Ask for a process; one of this id stays as it is."""
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
        """Return those that have not ended, in the order of their ids."""
        found = yield from self.query(_partition(model), _PREFIX)
        return [load(Process, fields) for fields in found]

    def tell(self, model: str, process_id: str, state: ProcessState, now: int) -> Operation[bool]:
        """Say what is wanted of a process, or what it is; False where it has ended."""
        try:
            yield from self.update(
                _key(model, process_id), {"state": state, "at": now}, "attribute_exists(pk)"
            )
        except ConditionFailed:
            return False
        return True

    def forget(self, model: str, process_id: str) -> Operation[None]:
        """Take note that a process has ended."""
        key = to_item(_key(model, process_id))
        yield Call("dynamodb", "delete_item", {"TableName": self.name, "Key": key})


def process_id(number: int) -> str:
    """Return the id of the process of this number."""
    return f"{_PREFIX}{number:011}"


def _partition(model: str) -> str:
    return f"WORKERS#{model}"


def _key(model: str, process_id: str) -> dict[str, object]:
    return {"pk": _partition(model), "sk": process_id}
