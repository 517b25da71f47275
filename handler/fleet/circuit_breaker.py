"""Circuit breaker of a fleet: stops the starts of a release in a crash loop. No I/O.

A crash loop pays for a GPU without a result, and does not end by itself. Crashes of one release
count if no row of the model comes between them. Another release, or a person, closes the
breaker; a breaker opened by a refusal of AWS is half-open from time to time (`reconcile`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tidemill.batch.fleet import (
    START_REFUSED,
    CircuitBreaker,
    EndKind,
    FleetPlan,
    FleetState,
    WaitingReason,
    Worker,
    WorkerEnd,
    WorkerRate,
    WorkerStatus,
)

from .backoff import back_off, is_failed_start

CRASHES_TO_TRIP: Final = 3
# Maximum time between two crashes of a loop: machine, image, weights, five tries to load. Half an
# hour for all would miss the crash loop of a large model, which costs most.
CRASH_GAP_SECONDS: Final = 2 * 3600
# An older shortage may be over.
_FRESH_SECONDS: Final = 30 * 60
# A release that crashes often between rows must not outgrow its table item.
_MAX_ENDS: Final = 20
_MEMORY_SECONDS: Final = CRASHES_TO_TRIP * CRASH_GAP_SECONDS
CRASH_LOOP: Final = "crash_loop"
STOPPED: Final = "stopped"

# Advice by a pattern in the last error. The first match counts.
_ADVICE: Final = (
    (r"known line", "Terminate the worker's machine, whose GPU is probably faulty"),
    (
        r"Cannotpull|pull access|manifest|ImagePull|ErrImage|InvalidImage",
        "Check that the image exists and that workers can reach its registry",
    ),
    (r"CreateContainerConfigError", "Check that the Secrets of its plan exist in the namespace"),
    (
        r"ResourceInitialization|secret|AccessDenied|not authorized",
        "Grant the workers' role the permission that was denied",
    ),
    (r"out of memory|OutOfMemory|\(exit status 137\)", "Give workers more memory"),
    (r"exit status 2\b", "Fix the worker setting that the last error names"),
    (r"", "Read the worker's log and fix the error in it"),
)
_START_ADVICE: Final = (
    (
        r"AccessDenied|not authorized",
        "Grant the Lambdas' role the permission to start workers and pass them their roles",
    ),
    (
        r"EMPTY CAPACITY PROVIDER|RESOURCE:",
        "Choose a GPU whose instance types are large enough for a worker",
    ),
    (r"Blocked", "Ask AWS Support why the account is blocked"),
    (r"forbidden: User", "Allow the launcher's Role to create Jobs in its namespace"),
    (r"^kubernetes ", "Fix the problem that Kubernetes reports"),
    (r"", "Fix the problem that AWS reports"),
)


def count_end(
    state: FleetState, end: WorkerEnd, plan: FleetPlan, rate: WorkerRate, now: int
) -> FleetState:
    """Return the state after the end of a worker; the breaker opens at the third crash in a row.

    A repeated event, and an end of a release other than the plan's, do not count.
    """
    launches = tuple(each for each in state.launches if each.worker != end.worker)
    state = replace(forget_other_releases(state, plan.release), launches=launches)
    is_known = any(each.worker == end.worker for each in state.ends)
    if is_known or end.release != plan.release or end.at <= now - _MEMORY_SECONDS:
        return state
    if end.kind is EndKind.REFUSED:
        return open_on_refusal(state, plan, end.reason, now)
    if is_failed_start(end):
        return back_off(state, end)
    if end.kind is not EndKind.CRASHED:
        return state
    recent = [each for each in state.ends if each.at > now - _MEMORY_SECONDS]
    state = replace(state, ends=(*recent[-_MAX_ENDS:], end))
    loop = _loop(state.ends, rate)
    if state.breaker or len(loop) < CRASHES_TO_TRIP:
        return state
    return replace(state, breaker=_tripped(loop, now))


def may_have_rows(workers: Iterable[Worker], release: str) -> bool:
    """Return whether rows may come from workers of a release: not if only others run."""
    running = {worker.release for worker in workers if worker.status is WorkerStatus.RUNNING}
    return not running or release in running


def _loop(ends: Sequence[WorkerEnd], rate: WorkerRate) -> list[WorkerEnd]:
    """Return the latest crashes in quick succession, without a row since the first."""
    bad = (each for each in ends if each.kind is EndKind.CRASHED and each.at > rate.rows_at)
    loop: list[WorkerEnd] = []
    for end in sorted(bad, key=lambda each: each.at):
        if loop and end.at - loop[-1].at > CRASH_GAP_SECONDS:
            loop = []
        loop.append(end)
    return loop


def forget_other_releases(state: FleetState, release: str) -> FleetState:
    """Return the state without the breaker and the crashes of other releases."""
    breaker = state.breaker if state.breaker and state.breaker.release == release else None
    ends = tuple(
        each for each in state.ends if each.release == release or each.kind is not EndKind.CRASHED
    )
    return replace(state, breaker=breaker, ends=ends)


def close_breaker(state: FleetState) -> FleetState:
    """Return the state with the breaker closed and no backoff: workers may start at once."""
    return replace(state, breaker=None, ends=(), not_before=0, refusal=None)


def open_by_operator(state: FleetState, plan: FleetPlan, now: int) -> FleetState:
    """Return the state after an operator has opened the breaker: no worker is started."""
    advice = f"Start them again with `tidemill workers resume {plan.model}`."
    return replace(
        state,
        breaker=CircuitBreaker(now, plan.release, STOPPED, "The workers were stopped.", advice),
    )


def open_on_refusal(state: FleetState, plan: FleetPlan, reason: str, now: int) -> FleetState:
    """Return the state after a start was refused for a reason that the operator must fix."""
    advice = _advice_for(reason, _START_ADVICE, plan.model)
    who = "Kubernetes" if plan.launcher == "kubernetes" else "AWS"
    words = f"{who} refuses to start workers: {_sentence(reason)} Retrying every 15 minutes."
    return replace(state, breaker=CircuitBreaker(now, plan.release, START_REFUSED, words, advice))


def describe_waiting(state: FleetState, now: float) -> WaitingReason | None:
    """Return the reason that the lines of a model wait; None if none is known."""
    if (breaker := state.breaker) is not None:
        message = f"{breaker.reason} {breaker.advice}"
        return WaitingReason(breaker.code, message, breaker.at)
    starts = [each for each in state.ends if is_failed_start(each)]
    if state.refusal is None or not starts or starts[-1].at <= now - _FRESH_SECONDS:
        return None
    since = next(each.at for each in starts if each.kind is starts[-1].kind)
    if starts[-1].kind is EndKind.NOT_STARTED:
        message = f"Another worker could not be started: {state.refusal}"
        return WaitingReason("not_started", f"{_sentence(message)} Retrying.", since)
    message = (
        f"No machine is available for another worker: {_sentence(state.refusal)} "
        "Retrying at increasing intervals."
    )
    return WaitingReason("no_capacity", message, since)


def _tripped(loop: Sequence[WorkerEnd], now: int) -> CircuitBreaker:
    end = loop[-1]
    minutes = max(1, math.ceil((end.at - loop[0].at) / 60))
    stderr = f' Last error: "{end.last_words}".' if end.last_words else ""
    reason = (
        f"{len(loop)} workers in a row crashed within {minutes} minutes without producing a row, "
        f"so no more are started. The last one: {_sentence(end.reason)}{stderr}"
    )
    advice = _advice_for(f"{end.reason} {end.last_words}", _ADVICE, end.model)
    return CircuitBreaker(now, end.release, CRASH_LOOP, reason, advice)


def _advice_for(words: str, known: Iterable[tuple[str, str]], model: str) -> str:
    what = next(advice for pattern, advice in known if re.search(pattern, words, re.IGNORECASE))
    return f"{what}, then deploy; or run `tidemill workers resume {model}` to try again."


def _sentence(words: str) -> str:
    return f"{words.rstrip('. ')}."
