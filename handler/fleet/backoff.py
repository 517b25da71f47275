"""Exponential backoff of failed starts, and its reason. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tidemill.batch.fleet import EndKind, FleetState, Worker, WorkerEnd, WorkerStatus

# Older refusals do not lengthen the backoff.
_MEMORY_SECONDS = 3600
_FIRST_SECONDS = 60
_MAX_SECONDS = 15 * 60


def back_off(state: FleetState, end: WorkerEnd) -> FleetState:
    """Return the state after a worker did not start: starts pause, each time twice as long.

    Starts that were requested together are refused together, so a refusal during a pause does not
    lengthen it.
    """
    launches = tuple(each for each in state.launches if each.worker != end.worker)
    state = replace(state, launches=launches)
    if end.at < state.not_before:
        return state
    earlier = [each for each in state.ends if each.kind is not end.kind]
    refusals = [
        each
        for each in state.ends
        if each.kind is end.kind
        and each.worker != end.worker
        and each.at > end.at - _MEMORY_SECONDS
    ]
    pause = min(_MAX_SECONDS, _FIRST_SECONDS * 2 ** min(len(refusals), 10))
    return replace(
        state,
        ends=(*earlier, *refusals, end),
        not_before=end.at + pause,
        refusal=end.reason,
    )


def record_failed_start(state: FleetState, end: WorkerEnd) -> FleetState:
    """Return the state after a start that failed for an unknown reason: no pause."""
    ends = [each for each in state.ends if each.kind is not EndKind.NOT_STARTED]
    return replace(state, ends=(*ends, end), refusal=end.reason)


def reset_backoff(state: FleetState, workers: Iterable[Worker]) -> FleetState:
    """Return the state given these workers: one that started since ends the backoff."""
    refusals = [each for each in state.ends if is_failed_start(each)]
    since = max((each.at for each in refusals), default=0)
    running = (each for each in workers if each.status is WorkerStatus.RUNNING)
    if state.refusal is None or not any((each.started_at or 0) > since for each in running):
        return state
    ends = tuple(each for each in state.ends if not is_failed_start(each))
    return replace(state, ends=ends, not_before=0, refusal=None)


def is_failed_start(end: WorkerEnd) -> bool:
    """Return whether this is a failed start rather than the end of a worker."""
    return end.kind in {EndKind.NO_CAPACITY, EndKind.NOT_STARTED}
