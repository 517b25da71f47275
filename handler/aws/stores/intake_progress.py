"""Intake progress in the table: the remaining work units of files that many runs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.batch.intake_progress import IntakeProgress, Phase, WorkUnit

from ...errors import ConditionFailed
from ..calls import Call, Operation
from ..items import dump, from_item, load, to_item
from .store import Store, condition, nothing_there


class IntakeProgressStore(Store):
    """Creates operations on the intake progress of a batch."""

    __slots__ = ()

    def get_or_create(self, batch_id: str, reading: IntakeProgress) -> Operation[IntakeProgress]:
        """Record the start, or return the existing progress."""
        return (yield from self._put_if(batch_id, reading, nothing_there()))

    def get_progress(self, batch_id: str) -> Operation[IntakeProgress | None]:
        """Return the intake progress, or None before the start."""
        fields = yield from self.get(_key(batch_id))
        return load(IntakeProgress, fields) if fields else None

    def complete_unit(self, batch_id: str, unit: WorkUnit) -> Operation[IntakeProgress]:
        """Remove a finished unit, idempotently, and return the progress.

        Raises ConditionFailed before intake has started.
        """
        response = yield Call(
            "dynamodb",
            "update_item",
            {
                "TableName": self.name,
                "Key": to_item(_key(batch_id)),
                "UpdateExpression": "DELETE #left :units",
                "ConditionExpression": "attribute_exists(pk)",
                "ExpressionAttributeNames": {"#left": "left"},
                "ExpressionAttributeValues": to_item({":units": {str(unit)}}),
                "ReturnValues": "ALL_NEW",
            },
        )
        return load(IntakeProgress, from_item(response["Attributes"]))

    def add_unit(self, batch_id: str, unit: WorkUnit) -> Operation[None]:
        """Add a unit that must be done before its phase ends."""
        yield Call(
            "dynamodb",
            "update_item",
            {
                "TableName": self.name,
                "Key": to_item(_key(batch_id)),
                "UpdateExpression": "ADD #left :units",
                "ExpressionAttributeNames": {"#left": "left", "#phase": "phase"},
                "ConditionExpression": "#phase = :phase",
                "ExpressionAttributeValues": to_item(
                    {":units": {str(unit)}, ":phase": str(unit.phase)}
                ),
            },
        )

    def start_phase(
        self, batch_id: str, reading: IntakeProgress, phase: Phase
    ) -> Operation[IntakeProgress]:
        """Move on from `phase`, or return the progress if another run already has."""
        still = condition("#phase = :phase", {":phase": str(phase)})
        return (yield from self._put_if(batch_id, reading, still))

    def note_enqueued(self, batch_id: str, phase: Phase) -> Operation[None]:
        """Record that all messages of a phase were sent, unless the phase has ended."""
        try:
            yield from self.update(
                _key(batch_id), {"is_rung": True}, "#phase = :phase", {":phase": str(phase)}
            )
        except ConditionFailed:
            return

    def _put_if(
        self, batch_id: str, reading: IntakeProgress, required: Mapping[str, Any]
    ) -> Operation[IntakeProgress]:
        """Write the progress under a condition, or return the stored one if that fails."""
        put = {"TableName": self.name, "Item": _item(batch_id, reading), **required}
        try:
            yield Call("dynamodb", "put_item", put)
        except ConditionFailed:
            there = yield from self.get_progress(batch_id)
            if there is None:
                raise
            return there
        return reading


def _key(batch_id: str) -> dict[str, object]:
    return {"pk": f"BATCH#{batch_id}", "sk": "READING"}


def _item(batch_id: str, reading: IntakeProgress) -> dict[str, object]:
    # A set, so that concurrent runs each remove their own units; no stored set is empty.
    left = {"left": set(reading.left) or None}
    return to_item(_key(batch_id) | dump(reading) | left)
