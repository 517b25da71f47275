"""Starts that came to nothing: a pause where no machine can be had, and the reason. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from handler.batch.fleet import End, EndKind, FleetState, Worker, WorkerStatus

# What was refused longer ago says nothing of now.
_MEMORY_SECONDS = 3600
_FIRST_SECONDS = 60
_MAX_SECONDS = 15 * 60


def refused(state: FleetState, end: End) -> FleetState:
    """Return the state after a worker had no machine: starts pause, twice as long each time.

    Those that were asked for together are refused together: a pause is lengthened by none of them.
    """
    launches = tuple(each for each in state.launches if each.worker != end.worker)
    state = replace(state, launches=launches)
    if end.at < state.not_before:
        return state
    earlier = [each for each in state.ends if not _is_refusal(each)]
    refusals = [
        each
        for each in state.ends
        if _is_refusal(each) and each.worker != end.worker and each.at > end.at - _MEMORY_SECONDS
    ]
    pause = min(_MAX_SECONDS, _FIRST_SECONDS * 2 ** min(len(refusals), 10))
    return replace(
        state,
        ends=(*earlier, *refusals, end),
        not_before=end.at + pause,
        refusal=end.reason,
    )


def not_started(state: FleetState, end: End) -> FleetState:
    """Return the state after a start that came to nothing, and nobody knows why: no pause."""
    ends = [each for each in state.ends if each.kind is not EndKind.NOT_STARTED]
    return replace(state, ends=(*ends, end), refusal=end.reason)


def granted(state: FleetState, workers: Iterable[Worker]) -> FleetState:
    """Return the state when these workers are seen: one that runs since then ends a shortage."""
    refusals = [each for each in state.ends if is_start(each)]
    since = max((each.at for each in refusals), default=0)
    running = (each for each in workers if each.status is WorkerStatus.RUNNING)
    if state.refusal is None or not any((each.started_at or 0) > since for each in running):
        return state
    ends = tuple(each for each in state.ends if not is_start(each))
    return replace(state, ends=ends, not_before=0, refusal=None)


def is_start(end: End) -> bool:
    """Say whether this is no worker's end, but that of a start that came to nothing."""
    return end.kind in {EndKind.NO_CAPACITY, EndKind.NOT_STARTED}


def _is_refusal(end: End) -> bool:
    return end.kind is EndKind.NO_CAPACITY
