"""Circuit breaker of a fleet: when it opens, its reason, and how it closes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handler.fleet.given import LOCAL, NOW, end_of
from tidemill.batch.fleet import (
    EndKind,
    FleetState,
    Launch,
    Worker,
    WorkerEnd,
    WorkerRate,
    WorkerStatus,
)
from tidemill.handler.fleet.circuit_breaker import (
    CRASH_GAP_SECONDS,
    CRASHES_TO_TRIP,
    close_breaker,
    count_end,
    describe_waiting,
    forget_other_releases,
    may_have_rows,
    open_by_operator,
)

STARTING, RUNNING, STOPPING = WorkerStatus.STARTING, WorkerStatus.RUNNING, WorkerStatus.STOPPING


def after(*ends: WorkerEnd, state: FleetState | None = None, rows_at: int = 0) -> FleetState:
    """Return the state after these ends, each counted at its time."""
    state = state or FleetState()
    for end in ends:
        state = count_end(state, end, LOCAL, WorkerRate(rows_at=rows_at), max(end.at, NOW))
    return state


LOOP = [end_of(f"w{n}", NOW + 10 * n) for n in range(CRASHES_TO_TRIP)]


def test_a_crash_loop_opens_the_breaker() -> None:
    """The last of too many ends gives the reason and the advice."""
    assert after(*LOOP[:-1]).breaker is None
    breaker = after(*LOOP).breaker
    assert breaker is not None
    assert (breaker.release, breaker.code, breaker.at) == ("r1", "crash_loop", LOOP[-1].at)
    assert "exit status 1" in breaker.reason
    assert "no GPU" in breaker.reason
    assert "tidemill workers resume local" in breaker.advice


def test_an_end_that_is_reported_twice_counts_once() -> None:
    """Events come at least once, in any order."""
    assert after(LOOP[0], LOOP[1], LOOP[0], LOOP[1], LOOP[0]).breaker is None


@given(
    reports=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from([EndKind.CRASHED, EndKind.CLEAN, EndKind.INTERRUPTED]),
        ),
        max_size=12,
    )
)
def test_events_in_any_order_and_number_mean_the_same(reports: list[tuple[int, EndKind]]) -> None:
    """A worker ends once: that many bad ends are a loop, in whatever order they are reported."""
    kinds = dict(reversed(reports))
    ends = [end_of(f"w{n}", NOW + n, kinds[n]) for n, _ in reports]
    num_bad = sum(kind is EndKind.CRASHED for kind in kinds.values())
    assert (after(*ends).breaker is not None) is (num_bad >= CRASHES_TO_TRIP)


def test_the_remembered_ends_are_bounded() -> None:
    """A release may die for ever and finish rows in between."""
    state = FleetState()
    for number in range(200):
        at = NOW + number
        state = count_end(state, end_of(f"w{number}", at), LOCAL, WorkerRate(rows_at=at), at)
    assert state.breaker is None
    assert len(state.ends) < 30


@pytest.mark.parametrize(("rows_at", "is_set"), [(NOW - 1, True), (NOW, False), (NOW + 15, False)])
def test_a_row_since_the_first_end_keeps_the_breaker_closed(rows_at: int, is_set: bool) -> None:  # noqa: FBT001
    """Workers that make progress between their deaths are worth their cost."""
    assert (after(*LOOP, rows_at=rows_at).breaker is not None) is is_set


@pytest.mark.parametrize(
    ("workers", "may"),
    [
        ([], True),
        ([("r1", RUNNING)], True),
        ([("r0", RUNNING)], False),
        ([("r0", RUNNING), ("r1", RUNNING)], True),
        ([("r0", RUNNING), ("r1", STARTING)], False),
        ([("r0", STOPPING)], True),
    ],
    ids=["none", "its own", "others", "both", "its own only start", "others have gone"],
)
def test_whose_rows_there_are(workers: list[tuple[str, WorkerStatus]], may: bool) -> None:  # noqa: FBT001
    """Rows of old workers prove nothing about a release that dies at its start."""
    there = [Worker(f"w{n}", *worker) for n, worker in enumerate(workers)]
    assert may_have_rows(there, "r1") is may


def test_a_row_forgives_only_what_was_before_it() -> None:
    """Too many ends after a row are a loop, whatever happened before."""
    state = after(end_of("early"), *[end_of(f"x{n}", NOW + 60 + n) for n in range(3)], rows_at=NOW)
    assert state.breaker is not None


def test_tasks_that_never_started_pause_starts_and_open_no_breaker() -> None:
    """Three of them, each for a reason that is on no list, double the pause of starts."""
    ends = [
        end_of(f"w{n}", NOW + 200 * n, EndKind.NOT_STARTED, reason="Words of tomorrow")
        for n in range(CRASHES_TO_TRIP)
    ]
    state = after(*ends)
    assert state.breaker is None
    assert state.not_before == ends[-1].at + 240
    waiting = describe_waiting(state, ends[-1].at)
    assert waiting is not None
    assert waiting.code == "not_started"
    assert "Words of tomorrow" in waiting.message


def test_an_end_that_only_we_can_fix_is_a_refused_start() -> None:
    """The breaker has the code of a refusal, with advice about the size of machines."""
    breaker = after(end_of("w1", NOW, EndKind.REFUSED, reason="RESOURCE:MEMORY")).breaker
    assert breaker is not None
    assert breaker.code == "start_refused"
    assert "RESOURCE:MEMORY" in breaker.reason
    assert "Choose a GPU whose instance types are large enough" in breaker.advice


@pytest.mark.parametrize("kind", [EndKind.CLEAN, EndKind.INTERRUPTED, EndKind.NO_CAPACITY])
def test_only_bad_ends_count(kind: EndKind) -> None:
    """Idle ends, stop requests and lost machines are not the release's fault."""
    assert after(*(replace(end, kind=kind) for end in LOOP)).breaker is None


def test_ends_long_apart_are_not_a_loop() -> None:
    """Ends from hours ago do not count, even if their events arrive late."""
    state = after(*LOOP[:2])
    late = end_of("late", LOOP[1].at + CRASH_GAP_SECONDS + 1)
    assert after(late, state=state).breaker is None
    old = end_of("old", NOW - CRASHES_TO_TRIP * CRASH_GAP_SECONDS)
    assert after(old, state=state) == state


def test_a_loop_of_long_starts_is_one() -> None:
    """A large model that dies when it has loaded for an hour is seen at its third start, too."""
    ends = [end_of(f"w{n}", NOW + CRASH_GAP_SECONDS * n) for n in range(CRASHES_TO_TRIP)]
    assert after(*ends[:-1]).breaker is None
    breaker = after(*ends).breaker
    assert breaker is not None
    assert "within 240 minutes" in breaker.reason


def test_ends_of_another_release_do_not_count() -> None:
    """Old workers that die while new ones come say nothing of those."""
    assert after(*(replace(end, release="r0") for end in LOOP)) == FleetState()


def test_a_launch_is_over_with_its_worker() -> None:
    """One that has ended is not waited for."""
    state = FleetState(launches=(Launch("w0", "r1", NOW), Launch("w1", "r1", NOW)))
    for kind in EndKind:
        left = after(end_of("w0", kind=kind), state=state).launches
        assert left == (Launch("w1", "r1", NOW),)


def test_another_release_closes_the_breaker() -> None:
    """It forgets only the ends of the previous release."""
    state = after(*LOOP)
    assert forget_other_releases(state, "r1") == state
    assert forget_other_releases(state, "r2") == replace(state, breaker=None, ends=())


def test_a_person_closes_the_breaker() -> None:
    """The next end is the first again."""
    state = close_breaker(after(*LOOP))
    assert state.breaker is None
    assert after(end_of("next", NOW + 60), state=state).breaker is None


def test_an_open_breaker_is_unchanged() -> None:
    """Further ends change neither its reason nor its time."""
    state = after(*LOOP)
    assert after(end_of("more", NOW + 90, reason="x"), state=state).breaker == state.breaker


@pytest.mark.parametrize(
    ("reason", "words", "advice"),
    [
        ("it ended with exit status 1", "this machine cannot run a known line", "Terminate"),
        ("CannotPullContainerError: x", None, "registry"),
        ("ResourceInitializationError: pull secrets", None, "role"),
        ("it was killed (exit status 137): OutOfMemoryError", None, "memory"),
        ("it ended with exit status 2", "--seed: no number", "setting"),
        ("it ended with exit status 1", "something else", "Read the worker's log"),
    ],
    ids=["known line", "image", "role", "memory", "setting", "any"],
)
def test_the_advice_depends_on_the_last_error(reason: str, words: str | None, advice: str) -> None:
    """The advice fits the error that ended the last worker."""
    ends = [replace(end, reason=reason, last_words=words) for end in LOOP]
    breaker = after(*ends).breaker
    assert breaker is not None
    assert advice in breaker.advice


def test_the_waiting_reason_of_a_batch() -> None:
    """It is an open circuit breaker, or a shortage with its time; none while all is well."""
    assert describe_waiting(FleetState(), NOW) is None
    waiting = describe_waiting(after(*LOOP), NOW)
    assert waiting is not None
    assert (waiting.code, waiting.since) == ("crash_loop", LOOP[-1].at)
    assert "no GPU" in waiting.message
    assert "tidemill workers resume local" in waiting.message


def test_a_shortage_is_a_waiting_reason() -> None:
    """It counts from the first refusal, while the last one is recent."""
    state = after(
        *(
            end_of(f"n{n}", NOW + n, EndKind.NO_CAPACITY, reason="no room for ml.g6")
            for n in range(2)
        )
    )
    waiting = describe_waiting(state, NOW + 60)
    assert waiting is not None
    assert (waiting.code, waiting.since) == ("no_capacity", NOW)
    assert "no room for ml.g6" in waiting.message
    assert describe_waiting(state, NOW + 3600) is None


def test_workers_that_a_person_has_stopped() -> None:
    """Batches say so, and how they go on."""
    waiting = describe_waiting(open_by_operator(FleetState(), LOCAL, NOW), NOW)
    assert waiting is not None
    assert waiting.code == "stopped"
    assert "tidemill workers resume local" in waiting.message
