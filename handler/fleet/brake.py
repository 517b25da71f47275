"""The brake of a fleet: workers that end badly again and again are started no more. No I/O.

A crash loop costs a GPU for nothing, and does not end by itself. What counts are bad ends of one
release without a row of the model between them; another release, or a person, lifts the brake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from handler.batch.fleet import (
    START_REFUSED,
    Brake,
    End,
    EndKind,
    FleetPlan,
    FleetState,
    Pace,
    Waiting,
    Worker,
    WorkerStatus,
)
from handler.fleet.capacity import is_start, refused

BRAKE_ENDS: Final = 3
# From one end to the next of a loop: machine, image, weights, five tries to load. Half an hour for
# all of them would never see the loop of a large model, and that is the one that costs most.
BRAKE_GAP_SECONDS: Final = 2 * 3600
# What found no machine for so long may find one now.
_FRESH_SECONDS: Final = 30 * 60
# A release that dies often and gets rows done all the while must not outgrow its item.
_MAX_ENDS: Final = 20
_MEMORY_SECONDS: Final = BRAKE_ENDS * BRAKE_GAP_SECONDS
CRASH_LOOP: Final = "crash_loop"
STOPPED: Final = "stopped"

# What helps, by what was said. The first that fits counts.
_ADVICE: Final = (
    (r"known line", "The GPU of its machine is most likely broken: end that machine"),
    (
        r"Cannotpull|pull access|manifest",
        "See that the image is there, and that workers reach its registry",
    ),
    (
        r"ResourceInitialization|secret|AccessDenied|not authorized",
        "See that the role of the workers may do what it was refused",
    ),
    (r"out of memory|OutOfMemory|\(exit status 137\)", "Give workers more memory, or less to hold"),
    (r"exit status 2\b", "A setting of the workers cannot be: mend what the last words name"),
    (r"", "Read the log of the worker and mend what it says"),
)
_START_ADVICE: Final = (
    (
        r"AccessDenied|not authorized",
        "See that the role of the Lambdas may start workers and pass them their roles",
    ),
    (r"EMPTY CAPACITY PROVIDER", "Choose a GPU whose machines are large enough for a worker"),
    (r"Blocked", "Ask AWS why the account is blocked"),
    (r"", "Mend what AWS names"),
)


def counted(state: FleetState, end: End, plan: FleetPlan, pace: Pace, now: int) -> FleetState:
    """Return the state after an end, with a brake where it is one too many.

    An end that is told twice, or that is not of the plan's release, counts for nothing.
    """
    launches = tuple(each for each in state.launches if each.worker != end.worker)
    state = replace(released(state, plan.release), launches=launches)
    is_known = any(each.worker == end.worker for each in state.ends)
    if is_known or end.release != plan.release or end.at <= now - _MEMORY_SECONDS:
        return state
    if end.kind is EndKind.NO_CAPACITY:
        return refused(state, end)
    if end.kind is not EndKind.BAD:
        return state
    recent = [each for each in state.ends if each.at > now - _MEMORY_SECONDS]
    state = replace(state, ends=(*recent[-_MAX_ENDS:], end))
    loop = _loop(state.ends, pace)
    if state.brake or len(loop) < BRAKE_ENDS:
        return state
    return replace(state, brake=_brake(loop, now))


def may_have_rows(workers: Iterable[Worker], release: str) -> bool:
    """Say whether rows may be those of workers of a release: not where only others run."""
    running = {worker.release for worker in workers if worker.status is WorkerStatus.RUNNING}
    return not running or release in running


def _loop(ends: Sequence[End], pace: Pace) -> list[End]:
    """Return the last bad ends, each soon after the one before, and no row since the first."""
    bad = (each for each in ends if each.kind is EndKind.BAD and each.at > pace.rows_at)
    loop: list[End] = []
    for end in sorted(bad, key=lambda each: each.at):
        if loop and end.at - loop[-1].at > BRAKE_GAP_SECONDS:
            loop = []
        loop.append(end)
    return loop


def released(state: FleetState, release: str) -> FleetState:
    """Return the state without the brake and the bad ends of other releases."""
    brake = state.brake if state.brake and state.brake.release == release else None
    ends = tuple(
        each for each in state.ends if each.release == release or each.kind is not EndKind.BAD
    )
    return replace(state, brake=brake, ends=ends)


def resumed(state: FleetState) -> FleetState:
    """Return the state without brake and pause: workers may be started at once."""
    return replace(state, brake=None, ends=(), not_before=0, refusal=None)


def halted(state: FleetState, plan: FleetPlan, now: int) -> FleetState:
    """Return the state in which a person has said that no worker shall be started."""
    advice = f"`tidemill workers resume {plan.model}` lets them be started again."
    return replace(
        state, brake=Brake(now, plan.release, STOPPED, "The workers were stopped.", advice)
    )


def barred(state: FleetState, plan: FleetPlan, reason: str, now: int) -> FleetState:
    """Return the state in which AWS has refused a start for what only we can mend."""
    advice = _advice_for(reason, _START_ADVICE, plan.model)
    words = f"AWS starts no worker: {_sentence(reason)} It is tried again every 15 minutes."
    return replace(state, brake=Brake(now, plan.release, START_REFUSED, words, advice))


def waiting_of(state: FleetState, now: float) -> Waiting | None:
    """Return why the lines of a model are not run, where that is known."""
    if (brake := state.brake) is not None:
        message = f"{brake.reason} {brake.advice}"
        return Waiting(brake.code, message, brake.at)
    starts = [each for each in state.ends if is_start(each)]
    if state.refusal is None or not starts or starts[-1].at <= now - _FRESH_SECONDS:
        return None
    since = next(each.at for each in starts if each.kind is starts[-1].kind)
    if starts[-1].kind is EndKind.NOT_STARTED:
        message = f"Another worker did not start, and it is not known why: {state.refusal}"
        return Waiting("not_started", f"{_sentence(message)} It is tried again.", since)
    message = (
        f"No machine can be had for another worker: {_sentence(state.refusal)} "
        "It is tried again, at longer intervals."
    )
    return Waiting("no_capacity", message, since)


def _brake(loop: Sequence[End], now: int) -> Brake:
    end = loop[-1]
    minutes = max(1, math.ceil((end.at - loop[0].at) / 60))
    said = f' Its last words: "{end.last_words}".' if end.last_words else ""
    reason = (
        f"{len(loop)} workers in a row ended badly, within {minutes} minutes and without a result, "
        f"so no more are started. The last one: {_sentence(end.reason)}{said}"
    )
    advice = _advice_for(f"{end.reason} {end.last_words}", _ADVICE, end.model)
    return Brake(now, end.release, CRASH_LOOP, reason, advice)


def _advice_for(words: str, known: Iterable[tuple[str, str]], model: str) -> str:
    what = next(advice for pattern, advice in known if re.search(pattern, words, re.IGNORECASE))
    return f"{what}, and deploy; or `tidemill workers resume {model}` to try again."


def _sentence(words: str) -> str:
    return f"{words.rstrip('. ')}."
