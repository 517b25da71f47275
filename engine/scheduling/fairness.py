"""Fairness between requests: one with many sequences does not hold up another with few."""

from __future__ import annotations

from .table import SequenceTable


def prompt_shares(table: SequenceTable) -> list[tuple[int, int]]:
    """Return the slots with prompts under way, and among how many requests each shares a step.

    Those that started first come in front. Where somebody waits for them, one of each request does,
    and these share alike what tokens a step has left; others take what is left then.
    """
    running = table.running
    pending = table.num_tokens[running] - table.num_computed[running]
    slots: list[int] = running[pending > 1].tolist()
    num_urgent = int(table.is_urgent[slots].sum()) if len(slots) > 1 else 0
    if num_urgent < 2:
        return [(slot, 1) for slot in slots]
    first_of: dict[str, int] = {}
    for slot in slots[:num_urgent]:
        first_of.setdefault(table.sequence(slot).request.request_id, slot)
    sharing = {slot: len(first_of) - place for place, slot in enumerate(first_of.values())}
    return [*sharing.items(), *((slot, 1) for slot in slots if slot not in sharing)]


def preemptible_slot(table: SequenceTable, request_id: str) -> int | None:
    """Return the newest sequence of the request that runs most, for a request that runs none.

    None where no request runs more than one, or this one runs some.
    """
    counts = table.num_running_of
    if not counts or request_id in counts:
        return None
    largest = max(counts, key=lambda name: counts[name])
    if counts[largest] == 1:
        return None
    slots: list[int] = table.running[::-1].tolist()
    return next(slot for slot in slots if table.sequence(slot).request.request_id == largest)
